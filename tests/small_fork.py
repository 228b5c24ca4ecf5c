"""A fork for tests: a setting of its own, by which all learning rates are multiplied."""

from dataclasses import dataclass, replace

import train_gpt as t


@dataclass(frozen=True)
class Hyperparameters(t.Hyperparameters):
    """train_gpt.py's settings, and one more."""

    speed: float = t.setting(1.0, "factor on every learning rate", group="of this fork")


def moment(step: int, hp: Hyperparameters) -> t.Moment:
    """Return train_gpt.py's moment with another learning rate."""
    now = t.moment(step, hp)
    return replace(now, lr=hp.speed * now.lr)


class Run(t.Run):
    """A run of this fork."""

    records = {"demo": Hyperparameters(**vars(t.RECORDS["demo"]), speed=0.5)}
    default_record = "demo"
    settings = Hyperparameters
    moment = staticmethod(moment)


if __name__ == "__main__":
    t.main(run_class=Run)
