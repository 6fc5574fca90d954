"""Members of a region: the calls that are in it, and what they take from outside."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...engine.tracing.template import Constant, Container, Read, Template, key, reads
from ..device_programs import DevicePrograms

_SCALARS: Final[tuple[type[Any], ...]] = (bool, int, float, complex, type(None))


@dataclass
class Member:
    """One call inside of a region.

    Attributes:
        source: the number of its value.
        name: of its node.
        location: "file:line" of the call.
        fn: the function.
        call: calls it with one argument for each parameter.
        programs: of its node.
        names: of its parameters.
        static: positions of its static arguments.
        templates: of its arguments.
    """

    source: int
    name: str
    location: str
    fn: Callable[..., Any]
    call: Callable[[tuple[Any, ...]], Any]
    programs: DevicePrograms
    names: tuple[str, ...]
    static: tuple[int, ...]
    templates: tuple[Template, ...]

    @property
    def identity(self) -> Hashable:
        """What members of equal regions have in common."""
        return self.name, self.location, self.fn, tuple(map(key, self.templates))


class Inputs:
    """What a region takes from outside: equal values once.

    Inside of it, the values of members are numbered from 0, and those from outside from -1 downwards.

    Attributes:
        templates: of the values, outside.
        names: of the parameters.
        static: those that are static.
        shared: those that a member wants to be the same for all calls of a batch.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.templates: list[Template] = []
        self.names: list[str] = []
        self.static: list[str] = []
        self.shared: dict[str, None] = {}
        self._members = {member.source: index for index, member in enumerate(members)}
        self._found: dict[Hashable, int] = {}

    def localised(self, member: Member) -> tuple[Template, ...]:
        """Return the templates of a member's arguments, with the numbers that the values have inside."""
        return tuple([
            self._whole(
                template, name, is_static=position in member.static, is_shared=name in member.programs.options.shared
            )
            for position, (template, name) in enumerate(zip(member.templates, member.names, strict=True))
        ])  # fmt: skip

    def _whole(self, template: Template, name: str, *, is_static: bool, is_shared: bool = False) -> Template:
        if any(read.source in self._members for read in reads(template)):
            return self._part(template, name)
        # Numbers are a part of the program, as if they were written in the function.
        if isinstance(template, Constant) and (is_static or type(template.value) in _SCALARS):
            return template
        read = self._input(template, name, is_static=is_static)
        if is_shared:
            self.shared[self.names[-1 - read.source]] = None
        return read

    def _part(self, template: Template, name: str) -> Template:
        if isinstance(template, Container):
            return dataclasses.replace(
                template, children=tuple([self._part(child, name) for child in template.children])
            )
        if isinstance(template, Read) and template.source in self._members:
            return Read(self._members[template.source], template.path)
        return self._whole(template, name, is_static=False)

    def _input(self, template: Template, name: str, *, is_static: bool) -> Read:
        identity = key(template), is_static
        try:
            index = self._found.setdefault(identity, len(self.templates))
        except TypeError:  # unhashable, so nobody can say whether it is equal to another
            index = len(self.templates)
        if index == len(self.templates):
            self.templates.append(template)
            self.names.append(self._free(name))
            self.static += [self.names[-1]] * is_static
        return Read(-1 - index)

    def _free(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        return next(one for one in itertools.chain([name], numbered) if one not in self.names)
