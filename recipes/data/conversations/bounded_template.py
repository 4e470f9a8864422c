"""Render a stranger's chat template within bounds of time and length, always to the same text.

A template comes with a download. The sandbox of transformers keeps it from reaching Python; here it is also kept from
running forever and from filling the memory: every loop, call and operator is counted, and a result is checked before
it is made where its size follows from its operands.
"""

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_SECONDS = 2.0  # of processor time for one conversation; published templates take milliseconds
_MAX_EXTRA = 100_000  # characters that a template may add to a conversation; the longest published one adds 20,000
_MAX_WIDTH = 10_000  # of padding and indentation
_MAX_BITS = 4096  # of a whole number
_CHECK_EVERY = 256  # operations between two looks at the clock, which takes a system call; most texts take fewer

_COUNTED, _SIZED = " counted", " sized"  # filters of our own; a name with a blank cannot be typed
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson"}
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")
_WIDE_BRACES = re.compile(r":[^}]*(\{|\d{5})")
_RANDOM_GLOBALS, _RANDOM_FILTERS = ("lipsum",), ("random",)  # a text that differs each time cannot be cached


def render(source: str, variables: dict[str, Any], *, num_input_characters: int) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a template, and the characters [start, end) of its `{% generation %}` blocks.

    Args:
        source: The template.
        variables: What it sees; plain data and functions.
        num_input_characters: Length of the conversation, in proportion to which a text may grow.

    Raises:
        ImportError: transformers is not installed.
        Exception: Whatever the template raises, also for exceeding a bound.
    """
    template = _compile(source)
    environment = cast(_BoundedEnvironment, template.environment)
    environment.start(max_size=_MAX_EXTRA + 4 * len(source) + 10 * num_input_characters)
    chunks: list[str] = []
    spans: list[tuple[int, int]] = []
    num_characters = 0
    with environment.activate_tracker(chunks, spans):  # type: ignore[attr-defined]  # an extension of transformers
        for chunk in template.generate(variables):
            num_characters += len(chunk)
            environment.check_size(num_characters)
            chunks.append(chunk)
    return "".join(chunks), spans


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    from transformers.utils.chat_template_utils import _compile_jinja_template  # for its sandbox, tags and filters

    return _BoundedEnvironment.like(_compile_jinja_template("").environment).from_string(source)


class _Counted:
    """An iterable whose items are counted."""

    def __init__(self, items: Any, count: Callable[[], None]) -> None:
        self._items = items
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._count()
            yield item

    def __len__(self) -> int:
        return len(self._items)


class _Bounds(NodeTransformer):
    """Passes what a template iterates over and what it joins through filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter(_COUNTED, node.iter, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(_SIZED, node, node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filter(_SIZED, node.filter, node.lineno)
        return node


def _filter(name: str, node: Any, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @classmethod
    def like(cls, other: Any) -> "_BoundedEnvironment":
        """Return an environment with the functions, filters and tags of another one."""
        made = object.__new__(cls)
        made.__dict__.update(other.__dict__)
        made.globals = {name: value for name, value in other.globals.items() if name not in _RANDOM_GLOBALS}
        made.filters = {
            name: made._bound(name, function) for name, function in other.filters.items() if name not in _RANDOM_FILTERS
        }
        # a filter with the context is not run when a template is compiled
        made.filters[_COUNTED] = pass_context(lambda _, items: _Counted(items, made.count))
        made.filters[_SIZED] = pass_context(lambda _, value: made._sized(value))
        made.start(max_size=_MAX_EXTRA)
        return made

    def start(self, *, max_size: int) -> None:
        """Begin to count: characters of a text or items of a list, and seconds."""
        self._max_size = max_size
        self._num_operations = 0
        self._deadline: float | None = None

    def count(self) -> None:
        """Count one operation."""
        self._num_operations += 1
        if self._num_operations % _CHECK_EVERY:
            return
        seconds = time.thread_time()
        self._deadline = self._deadline or seconds + _MAX_SECONDS
        if seconds > self._deadline:
            raise SecurityError(f"it computes for more than {_MAX_SECONDS:g} s")

    def check_size(self, size: int) -> None:
        """Reject a text or list that is too long."""
        if size > self._max_size:
            raise SecurityError(f"it makes more than {self._max_size:,} characters of this conversation")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function; the names are those of the parent, because a template may pass any keyword."""
        __self.count()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = (__self._check_join(owner, args[0]), *args[1:])
            __self._check_growth(__obj.__name__, owner, [*args, *kwargs.values()])
        return __self._sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator."""
        self.count()
        if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise SecurityError(f"it pads to more than {_MAX_WIDTH:,} characters")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self.check_size(len(value) * times)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise SecurityError("it computes a number of more than a thousand digits")
        return self._sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe `str.format`, unless its widths are too large or come from its arguments."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__):
            raise SecurityError(f"it pads to more than {_MAX_WIDTH:,} characters")
        return wrapped

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        _Bounds().visit(source)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def _bound(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that is counted, and whose result is checked."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the value follows the context, if that is passed

        @functools.wraps(function)
        def bound(*args: Any, **kwargs: Any) -> Any:
            self.count()
            value, *others = args[first:]
            if name == "format" and _WIDE_PERCENT.search(str(value)):
                raise SecurityError(f"it pads to more than {_MAX_WIDTH:,} characters")
            if name == "join":
                args = (*args[:first], self._check_join(str(others[0]) if others else "", value), *others)
            self._check_growth(name, value, [*others, *kwargs.values()])
            return self._sized(function(*args, **kwargs))

        return bound

    def _check_growth(self, name: str, value: Any, others: list[Any]) -> None:
        """Reject what would make a long text of a short one."""
        if name in _PADDING and any(isinstance(other, int) and other > _MAX_WIDTH for other in others):
            raise SecurityError(f"it pads to more than {_MAX_WIDTH:,} characters")
        if name == "replace" and len(others) >= 2 and all(isinstance(other, str) for other in others[:2]):
            self.check_size(str(value).count(others[0]) * len(others[1]))

    def _check_join(self, separator: str, items: Any) -> list[Any]:
        """Return items whose joined text is not too long."""
        found = list(items)
        num_characters = sum(len(item) for item in found if isinstance(item, str))
        self.check_size(num_characters + len(found) * len(separator))
        return found

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self.check_size(len(value))
        return value
