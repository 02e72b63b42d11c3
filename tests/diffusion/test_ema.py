import pytest
import torch

from megatron_pulse.diffusion.ema import ExponentialMovingAverage


def parameters(value, dtype=torch.float32):
    return {
        "a": torch.full((2,), value, dtype=dtype),
        "b": torch.full((3, 1), 2 * value, dtype=dtype),
    }


def test_update_follows_the_formula():
    ema = ExponentialMovingAverage(parameters(0.0).items(), decay=0.5)
    expected = 0.0
    for step, value in enumerate([1.0, 3.0, -2.0] * 10):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
        ema.update(parameters(value).items(), step)
    torch.testing.assert_close(ema.state, parameters(expected))


def test_averages_are_fp32_copies():
    source = parameters(1.0, torch.bfloat16)
    ema = ExponentialMovingAverage(source.items(), decay=0.999)
    source["a"].zero_()
    ema.update(source.items(), 10_000)
    assert ema.state["a"].dtype == torch.float32
    torch.testing.assert_close(ema.state["a"], torch.full((2,), 0.999))


def test_state_round_trip_and_faults():
    ema = ExponentialMovingAverage(parameters(0.0).items())
    ema.load_state(parameters(4.0))
    torch.testing.assert_close(ema.state, parameters(4.0))
    with pytest.raises(ValueError) as error:
        ema.load_state({"a": torch.zeros(5), "c": torch.zeros(1)})
    for part in ("missing: b", "unknown: c", "a: saved (5,), expected (2,)"):
        assert part in str(error.value)
    with pytest.raises(KeyError, match="missing: b"):
        ema.update([("a", torch.zeros(2))], 0)
    with pytest.raises(ValueError, match="decay"):
        ExponentialMovingAverage([], decay=1.0)
