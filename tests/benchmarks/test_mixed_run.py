"""Plans of the emulated run on unlike devices, by the simulator."""

from megatron_pulse.planner.program.simulate import simulate_step
from tests.benchmarks.emulation import emulate
from tests.benchmarks.mixed_run import DEVICES, LEAST_GAIN, SLOW, at_real_speed, candidates, gain


def test_mixed_plan_is_faster_than_those_for_like_devices() -> None:
    *others, mixed = candidates(emulate("dit-xl-2"), 12.0, 2.0)
    assert gain([other.predicted_s for other in others], mixed.predicted_s) >= LEAST_GAIN
    assert mixed.fits(12.0) and sorted(mixed.kinds) == sorted(DEVICES)
    # The slow device makes the uniform plan's step longer, at the same cuts and order.
    uniform = others[0]
    slower = at_real_speed(uniform.problem, [SLOW] * len(DEVICES))
    assert simulate_step(slower, uniform.schedule, ()).timeline.makespan > uniform.predicted_s
