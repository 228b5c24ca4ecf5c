"""A fork for tests: a setting of its own, by which all learning rates are multiplied."""

from dataclasses import dataclass

import train_gpt as t


@dataclass(frozen=True)
class Hyperparameters(t.Hyperparameters):
    speed: float = 1.0  # factor on every learning rate


class Moment(t.Moment):
    def __init__(self, step: int, hp: Hyperparameters):
        super().__init__(step, hp)
        self.lr *= hp.speed


class Run(t.Run):
    records = {"demo": Hyperparameters(**vars(t.RECORDS["demo"]), speed=0.5)}
    default_record = "demo"
    Moment = Moment


if __name__ == "__main__":
    t.main(run=Run)
