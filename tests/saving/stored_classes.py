"""Classes whose instances the tests store: they are in a module of their own, so that reading can import them."""

import enum
import functools
from dataclasses import InitVar, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import pydantic

T = TypeVar("T")


class Colour(enum.Enum):
    RED = (255, 0)
    CRIMSON = (255, 0)  # noqa: PIE796 - another name of it
    BLUE = object()


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclass
class Point:
    x: float
    y: Any = 0

    @functools.cached_property
    def size(self) -> float:
        return abs(self.x)


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    seen: list[int] = field(default_factory=list, compare=False)


@dataclass
class Computed(Generic[T]):
    of: T
    twice: Any = field(init=False)
    start: InitVar[int] = 1

    def __post_init__(self, start: int) -> None:
        self.twice = [self.of, start]


@dataclass
class Outer:
    inner: Point

    @dataclass
    class Inside:
        image: Any


class Pair(NamedTuple):
    left: Any
    right: Any = None


class Model(pydantic.BaseModel):
    name: str
    parts: list["Model"] = []
    at: Point | None = None
    _secret: int = pydantic.PrivateAttr(default=1)


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True)
    value: Any


class Root(pydantic.RootModel[list[int]]):
    pass


class Plain:
    pass


@dataclass
class Versioned:
    __version__ = 1
    value: int


@dataclass
class OfDict(dict[str, int]):
    value: int
