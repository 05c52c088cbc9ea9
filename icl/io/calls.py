"""Storage calls that may never return, as a flush to a dead disk does: each is given up after a time."""

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import attrs

LONGEST_CALL_SECONDS = 600.0  # gcsfs, with all its tries, gives up before that
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class NoEndError(Exception):
    """A call has not ended; its thread is left alone with it, and does not keep the process from ending."""


@attrs.define
class Calls:
    """The calls to one store. While one of them hangs, none is started: it would most likely hang as well."""

    _hanging: list[threading.Thread] = attrs.field(factory=list)

    def make(
        self, call: Callable[_Parameters, _Result], /, *arguments: _Parameters.args, **options: _Parameters.kwargs
    ) -> _Result:
        """What a call returns or raises. Raises NoEndError when that takes too long, OSError without a thread."""
        if any(thread.is_alive() for thread in self._hanging):
            raise NoEndError(f"an earlier call without an end in {LONGEST_CALL_SECONDS:g} s")
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments, **options))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="icl-storage", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit on processes
            raise OSError(errno.EAGAIN, f"no thread for a storage call ({error})") from None
        thread.join(LONGEST_CALL_SECONDS)
        if not future.done():
            self._hanging.append(thread)
            raise NoEndError(f"no end of the call in {LONGEST_CALL_SECONDS:g} s")
        return future.result()
