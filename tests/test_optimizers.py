"""Which parameter is trained by what, and the state that optimizers keep, shared out and saved."""

import pytest
import torch

import train_gpt
from train_gpt import GPT, Bucket, Optimizers


def test_a_parameter_that_no_optimizer_takes_is_named(tiny):
    model = GPT(tiny)
    model.gate = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match=r"gate.weight is in 0 groups"):
        Optimizers(model, tiny)


def test_state_may_have_another_shape_than_its_parameter(tiny):
    """As NorMuon keeps a number for each row of a matrix, beside the momentum."""
    model = GPT(tiny)
    optimizers = Optimizers(model, tiny)
    train_gpt.train_step(model, optimizers, *2 * [torch.ones(1, 128, dtype=torch.int64)], 0)
    kept = []
    for bucket in optimizers.muon.buckets:
        state, (rows, _) = optimizers.muon.state[bucket.params[0]], bucket.row_shape
        state["rows"] = torch.rand(bucket.share_len, rows, 1)
        kept.append({name: value.clone() for name, value in state.items()})
    saved = optimizers.state_dict()
    again = Optimizers(model, tiny)
    again.load_state_dict(saved)
    for bucket, state in zip(again.muon.buckets, kept, strict=True):
        found = again.muon.state[bucket.params[0]]
        assert found.keys() == state.keys() == {"momentum_buffer", "rows"}
        assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_shares_of_any_state_are_the_whole(ranks):
    """Two parameters of 2 and 3 matrices, the last share padded with zeros."""
    params = [torch.zeros(2, 4, 6), torch.zeros(3, 4, 6)]
    for shape in ((4, 6), (4, 1)):
        state = [torch.rand(2, *shape), torch.rand(3, *shape)]
        shares = [Bucket(params, 2, rank, ranks).share(state) for rank in range(ranks)]
        whole = torch.cat(shares)
        assert len({len(share) for share in shares}) == 1 and not whole[5:].any()
        assert torch.equal(whole[:5], torch.cat(state))
