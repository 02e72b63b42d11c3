"""The filling problem as an exact model for CP-SAT, for small cases with whole seconds.

Every (layer, sample) is an interval on one of the devices, beside the schedule's operations, which
stay where they are.
"""

from __future__ import annotations

import math

from megatron_pulse.planner.bubble_fill.problem import FillProblem


def shortest(problem: FillProblem, seconds: float) -> tuple[float, bool]:
    """The shortest filled step that is found, and whether it is proved.

    Pieces are of one sample; of a chain of layers between which nothing else runs the search makes
    one slice, which is the same here. Memory counts as ``check.peak_bytes`` does, results' messages
    of a device follow each other.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = math.ceil(
        problem.timeline.makespan
        + problem.num_samples * sum(4 * c.chain_s(1) + 8 for c in problem.components)
    )
    devices = range(problem.num_devices)
    busy: list[list[cp_model.IntervalVar]] = [[] for _ in devices]
    for device, order in enumerate(problem.schedule.order):
        for op in order:
            start, end = problem.timeline.start[op], problem.timeline.end[op]
            assert start == round(start) and end == round(end), "times must be whole"
            busy[device].append(
                model.new_fixed_size_interval_var(round(start), round(end - start), "")
            )
    start_of: dict[tuple[int, int, int], cp_model.IntVar] = {}
    end_of: dict[tuple[int, int, int], cp_model.IntVar] = {}
    here: dict[tuple[int, int, int, int], cp_model.IntVar] = {}
    demands: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in devices]
    hosted: list[list[tuple[cp_model.IntVar, int]]] = [[] for _ in devices]
    makespan = model.new_int_var(round(problem.timeline.makespan), horizon, "makespan")
    for c, component in enumerate(problem.components):
        for layer, what in enumerate(component.layers):
            took = round(what.time_s(1))
            for d in devices:
                host = model.new_bool_var("")
                hosted[d].append((host, round(what.parameter_bytes)))
                for s in range(problem.num_samples):
                    here[c, layer, s, d] = model.new_bool_var("")
                    model.add_implication(here[c, layer, s, d], host)
                    if not component.may_run_on(d):
                        model.add(here[c, layer, s, d] == 0)
            for s in range(problem.num_samples):
                start = model.new_int_var(0, horizon, "")
                end = model.new_int_var(0, horizon, "")
                model.add(end == start + took)
                model.add_exactly_one(here[c, layer, s, d] for d in devices)
                for d in devices:
                    interval = model.new_optional_interval_var(
                        start, took, end, here[c, layer, s, d], ""
                    )
                    busy[d].append(interval)
                    demands[d].append((interval, round(what.activation_bytes)))
                start_of[c, layer, s], end_of[c, layer, s] = start, end
                model.add(makespan >= end)

    def follows(source: tuple[int, int, int], target: tuple[int, int, int], size: float) -> None:
        """``target`` takes ``size`` bytes that ``source`` has left."""
        lag = problem.link.time_s(size)
        assert lag == round(lag)
        wait = model.new_int_var(0, horizon, "")
        model.add(start_of[target] == end_of[source] + wait)
        for d in devices:
            at_source, at_target = here[(*source, d)], here[(*target, d)]
            model.add(wait >= round(lag)).only_enforce_if([at_source, at_target.negated()])
            either = model.new_bool_var("")
            model.add_max_equality(either, [at_source, at_target])
            interval = model.new_optional_interval_var(
                end_of[source], wait, start_of[target], either, ""
            )
            demands[d].append((interval, round(size)))

    for c, component in enumerate(problem.components):
        for s in range(problem.num_samples):
            for layer in range(1, len(component.layers)):
                left = component.layers[layer - 1].output_bytes
                follows((c, layer - 1, s), (c, layer, s), left)
            for b in problem.before[c]:
                last = len(problem.components[b].layers) - 1
                follows((b, last, s), (c, 0, s), problem.components[b].result_bytes)
    messages: list[list[cp_model.IntervalVar]] = [[] for _ in devices]
    for c, component in enumerate(problem.components):
        last = len(component.layers) - 1
        lag = problem.result_lag_s(c, 1)
        assert lag == round(lag)
        for s in range(problem.num_samples):
            for d in devices:
                away = len({*component.consumers} - {d})
                size = away * round(lag)
                if size:
                    start = model.new_int_var(0, horizon, "")
                    end = model.new_int_var(0, horizon, "")
                    model.add(start >= end_of[c, last, s]).only_enforce_if(here[c, last, s, d])
                    model.add(end <= makespan).only_enforce_if(here[c, last, s, d])
                    messages[d].append(
                        model.new_optional_interval_var(start, size, end, here[c, last, s, d], "")
                    )
    for d in devices:
        model.add_no_overlap(busy[d])
        model.add_no_overlap(messages[d])
        if problem.free_bytes is not None:
            room = round(problem.free_bytes[d] - problem.results_on(d))
            used = model.new_int_var(0, max(room, 0), "")
            model.add(used == sum(size * host for host, size in hosted[d]))
            held = model.new_fixed_size_interval_var(0, horizon + 1, "")
            model.add_cumulative(
                [held, *(interval for interval, _ in demands[d])],
                [used, *(size for _, size in demands[d])],
                room,
            )
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(f"CP-SAT: {solver.status_name(status)}")
    return solver.objective_value, status == cp_model.OPTIMAL
