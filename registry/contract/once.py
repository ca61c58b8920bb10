"""An attribute that is worked out when it is first asked for.

As functools.cached_property, without the lock that Python up to 3.11 takes for each: two threads may work it out, and
come to the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class once(Generic[_T]):
    """Kept in the instance, where it is found before this is asked."""

    def __init__(self, work_out: Callable[[Any], _T]) -> None:
        self._work_out, self.__doc__ = work_out, work_out.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[_T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._work_out(instance)
        return found
