"""Recording of the operations that initialise a module's tensors (deferred initialisation).

A parameter loses its memory when it is registered. Later operations on it and on derived tensors
are recorded, and only shapes are computed. All other operations are executed and recorded, except
on the meta device, which has no values.

Random operations without memory are executed on a scratch tensor, so that later draws are
unchanged. With the generator's earlier state they can be replayed at any time. torchdistX's
deferred initialisation does not preserve random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pulse.tracing.initial_weights.meta_init import replacing_parameters
from megatron_pulse.tracing.initial_weights.op_tape import (
    FromGenerator,
    StorageView,
    Tape,
    TapedCall,
    name_of,
    tensors_in,
)

_DRAWN = ("uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_LIKE = ("rand_like", "randn_like", "randint_like")
"""Random operations that do not depend on the values of their inputs."""
_METADATA = frozenset((*FunctionalTensor.metadata_fns, torch.ops.prim.layout.default))
"""C++ queries of a tensor's device and shape, which must not raise."""
_READERS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
_SET_DATA = Tensor.data.__set__


def _restore(target: Tensor, values: Tensor) -> Tensor:
    return target.copy_(values)


class TapeRecorder(TorchDispatchMode):
    """Dispatch mode that records operations on ``tape`` within ``making``; parameters have no
    memory.

    ``faults`` are exceptions that the module's own operations, with memory, would not have raised.
    Code that catches one continues without being recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.faults: list[Exception] = []
        self._own: Exception | None = None
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._hollow: set[int] = set()
        self._twins: dict[int, FakeTensor] = {}
        self._outside: dict[int, Tensor] = {}
        self._number = 0
        self._drawn = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Record the creation of a module."""
        apply = nn.Module._apply
        with ExitStack() as stack:
            stack.enter_context(torch.device("cpu"))
            stack.enter_context(_Python(self))
            stack.enter_context(self)
            stack.enter_context(replacing_parameters(self._registered))
            nn.Module._apply = _apply
            try:
                yield
            finally:
                nn.Module._apply = apply

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record exceptions in ``faults``, except those of an executed operation."""
        try:
            yield
        except Exception as error:
            if error is not self._own:
                self.faults.append(error)
            raise
        finally:
            self._own = None

    def _registered(self, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, FakeTensor) or is_lazy(parameter) or parameter.is_meta:
            return parameter
        with self.noting():
            return nn.Parameter(self.emptied(parameter), parameter.requires_grad)

    def is_given(self, tensor: Tensor) -> bool:
        """True if ``tensor`` has values from outside, such as a file."""
        memory = tensor.untyped_storage()._cdata
        if isinstance(tensor, FakeTensor) or memory not in self._known:
            return not isinstance(tensor, FakeTensor)
        number = self._known[memory][1]
        return number in self._outside and number not in self._hollow

    def emptied(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by one without memory; operations on either affect both."""
        place = self.place(tensor.detach())
        self._hollow.add(place.storage)
        return self._twin(tensor.detach(), place)

    def place(self, tensor: Tensor) -> StorageView:
        """Storage view of ``tensor``. Memory from outside is snapshotted."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self._known:
            self._name(memory)
        number = self._known[key][1]
        place = StorageView(
            number,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        is_kept = number in self._outside or not self.tape.knows(number)
        if is_kept and not isinstance(tensor, FakeTensor) and number not in self._hollow:
            self._keep(number, memory)
        return place

    def expose(self, tensor: Tensor) -> None:
        """Mark ``tensor`` as open to writes that are not recorded."""
        number = self.place(tensor).storage
        self._outside.setdefault(number, torch.empty(0, dtype=torch.uint8))

    def read(self, tensor: Tensor) -> Tensor:
        """Current values of ``tensor``."""
        place = self.place(tensor)
        if place.storage not in self._hollow:
            return tensor
        return self.tape.play(place)

    def has_no_memory(self, tensor: Tensor) -> bool:
        """True if ``tensor`` has no memory."""
        return isinstance(tensor, FakeTensor) or self.place(tensor).storage in self._hollow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record and execute an operation, on shapes alone if an input has no memory."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with self._fake:
                return func(*args, **kwargs)
        with self.noting():
            return self._recorded(func, args, kwargs)

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tensors_in((args, kwargs)) if _has_values(t)]
        places = {id(tensor): self.place(tensor) for tensor in tensors}
        written = _written(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        generator = next(
            (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)), None
        )
        drawn = generator or torch.default_generator
        state = drawn.get_state() if is_random else None
        hollow = [t for t in tensors if self.has_no_memory(t)]
        to_values = any(not self.has_no_memory(t) for t in written) or not _gives_tensors(func)
        if hollow and not to_values:
            if is_random:
                self._draw(func, args, kwargs)
            fakes = {id(t): self._twin(t, places[id(t)]) for t in hollow}
            results = _with(func, args, kwargs, lambda t: fakes.get(id(t), t), self._fake)
            results = pytree.tree_map_only(FakeTensor, _let_go, results)
        elif hollow:
            results = _with(func, args, kwargs, self.read)
        else:
            try:
                results = func(*args, **kwargs)
            except Exception as error:
                self._own = error
                raise
        found = [t for t in tensors_in(results) if _has_values(t)]
        for tensor in found:
            key = tensor.untyped_storage()._cdata
            if key not in self._known:
                number = self._name(tensor.untyped_storage())
                self.tape.begin(number)
                if isinstance(tensor, FakeTensor):
                    self._hollow.add(number)
        given = tuple(map(self.place, found))
        before = {place.storage for place in places.values()}
        writes = {places[id(t)].storage for t in written} | {
            place.storage for place in given if place.storage not in before
        }
        if writes:
            at, by = pytree.tree_map(
                lambda leaf: (
                    places.get(id(leaf), leaf)
                    if isinstance(leaf, Tensor)
                    else FromGenerator()
                    if isinstance(leaf, torch.Generator)
                    else leaf
                ),
                (tuple(args), kwargs),
            )
            step = TapedCall(func, at, by, given, torch.get_default_dtype(), state)
            self.tape.add(step, writes)
        return written[0] if len(written) == 1 and _returns_written(func) else results

    def _name(self, memory: torch.UntypedStorage) -> int:
        self._number += 1
        # the reference prevents reuse of the address
        self._known[memory._cdata] = (StorageWeakRef(memory), self._number)
        return self._number

    def _keep(self, number: int, memory: torch.UntypedStorage) -> None:
        """Record the current contents of ``memory``, unless known."""
        now = torch.empty(0, dtype=torch.uint8).set_(memory)
        last = self._outside.get(number)
        if last is not None and torch.equal(last, now):
            return
        self._outside[number] = copy = now.clone()
        whole = StorageView(number, torch.uint8, (len(now),), (1,), 0, False, False)
        dtype = torch.get_default_dtype()
        if not self.tape.fills(number):
            size: Any = [len(now)]
            make = torch.ops.aten.zeros.default
            made = TapedCall(
                make, (size,), {"dtype": torch.uint8, "device": "cpu"}, (whole,), dtype
            )
            self.tape.add(made, (number,))
        self.tape.add(TapedCall(_restore, (whole, copy), {}, (whole,), dtype), (number,))

    def _twin(self, tensor: Tensor, place: StorageView) -> Tensor:
        """Fake stand-in of a tensor whose memory was released, or the fake ``tensor`` itself."""
        if isinstance(tensor, FakeTensor):
            return tensor
        number = place.storage
        if number not in self._twins:
            size = tensor.untyped_storage().nbytes()
            with self._fake:
                base = torch.empty(size, dtype=torch.uint8, device="cpu")
            assert isinstance(base, FakeTensor)
            memory = base.untyped_storage()
            self._known[memory._cdata] = (StorageWeakRef(memory), number)
            self._twins[number] = base
        base = self._twins[number]
        whole = len(base) - len(base) % tensor.element_size()
        with self._fake:
            values = base[:whole].view(tensor.dtype)
            return values.as_strided(place.shape, place.stride, place.offset)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Advance the generator as ``func`` does."""
        name = name_of(func)
        if name in _LIKE or name in _DRAWN:
            _with(func, args, kwargs, self._scratch)
        else:
            _with(func, args, kwargs, lambda tensor: self.read(tensor).clone())

    def _scratch(self, tensor: Tensor) -> Tensor:
        """Scratch memory in the layout of ``tensor``.

        The buffer is reused, because pages freed between others do not return to the system.
        """
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        if size > len(self._drawn):
            self._drawn = torch.empty(size, dtype=torch.uint8, device="cpu")
        values = self._drawn[:size].view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride())


def _apply(part: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replacement of ``nn.Module._apply`` for real tensors; torch swaps tensors of
    other classes.
    """
    for child in part.children() if recurse else ():
        child._apply(fn)
    for name, parameter in part._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            if _has_values(parameter):
                parameter.data = fn(parameter)
            else:
                part._parameters[name] = nn.Parameter(fn(parameter), parameter.requires_grad)
    for name, buffer in part._buffers.items():
        part._buffers[name] = buffer if buffer is None else fn(buffer)
    return part


class _Python(TorchFunctionMode):
    """Function mode for reads of values into Python, and for replaced tensor memory."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder, kwargs = self._recorder, kwargs or {}
        if func in _READERS and not is_lazy(args[0]) and _has_values(args[0]):
            if recorder.has_no_memory(args[0]):
                with recorder.noting(), _paused():
                    values = func(recorder.read(args[0].detach()), *args[1:], **kwargs)
                if hasattr(values, "flags"):
                    values.flags.writeable = False
                return values
            recorder.expose(args[0].detach())
        if func == _SET_DATA and any(_has_values(a) and recorder.has_no_memory(a) for a in args):
            func(*(a if isinstance(a, FakeTensor) else recorder.emptied(a) for a in args))
            return None
        return func(*args, **kwargs)


def _has_values(tensor: Tensor) -> bool:
    """True if ``tensor`` has values or recorded ones; False on the meta device."""
    return isinstance(tensor, FakeTensor) or not tensor.is_meta


def _let_go(tensor: FakeTensor) -> Tensor:
    """Convert a copy to the meta device into a plain meta tensor, which is not recorded."""
    if tensor.device.type != "meta":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _paused() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _with(
    func: Any,
    args: Any,
    kwargs: Any,
    change: Callable[[Tensor], Tensor],
    mode: FakeTensorMode | None = None,
) -> Any:
    """Call ``func`` with tensors replaced by ``change``."""
    args, kwargs = pytree.tree_map_only(Tensor, change, (args, kwargs))
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments that ``func`` writes in place."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            found += filter(_has_values, tensors_in(value))
    return found


def _returns_written(func: Any) -> bool:
    returns = func._schema.returns
    return (
        len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    )


def _gives_tensors(func: Any) -> bool:
    return all("Tensor" in str(each.type) for each in func._schema.returns)
