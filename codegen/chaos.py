"""Random sleeps at every barrier of a GPU kernel, which make races visible (ATTNFORGE_CHAOS).

They are planted into rendered text, so templates and ordinary sources hold none of it. What counts as a barrier is an
instruction, not a name. Functions that whole warps call (TOGETHER) sleep before it, and after it where they return
nothing. Those that one lane of a warp calls while the others wait for it (ELECTED) are preceded by a sleep of the warp,
outside of the branch that elects the lane: a sleep inside would make it a real branch, and ptxas would then take the
wgmma around it one by one. Results may not depend on any of it: benchmarks/race_hunt.py compares them bit by bit.
"""

from __future__ import annotations

import re

# PTX by which threads, blocks or copies wait for one another or tell one another that they may go on.
TOGETHER = (
    "mbarrier.try_wait",
    "mbarrier.arrive.expect_tx",
    "bar.sync",
    "barrier.sync",
    "bar.arrive",
    "barrier.cluster",
    "cp.async.bulk.tensor.5d.shared",
    "cp.async.bulk.shared",
    "cp.async.wait_group",
    "wgmma.wait_group",
    "ld.acquire",
    "griddepcontrol",
)
ELECTED = (
    "mbarrier.arrive.shared",
    "cp.async.bulk.tensor.5d.global",
    "cp.async.bulk.global",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "cp.reduce.async.bulk",
    "fence.proxy.async",
    "red.release",
)

SLEEP = """\
// Warp: sleep, one time in eight for up to a microsecond, now and then for up to 16, else not at all.
__device__ __forceinline__ void chaos_sleep() {{
    unsigned x;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(x));
    x = (x ^ blockIdx.x * 0x9e3779b9u ^ threadIdx.x / 32 * 0x85ebca6bu ^ {seed}u) * 0xc2b2ae35u;
    x = (x ^ x >> 15) * 0x27d4eb2fu;
    const unsigned nanoseconds = x >> 24 < 2 ? x & 16383 : x >> 24 < 32 ? x & 1023 : 0;
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
}}

"""

# A function at the left margin: what precedes its name, and its body. Its closing brace is at the margin, too.
_FUNCTION = re.compile(
    r"^(?P<head>(?:template <[^\n]*>\n)?__device__ __forceinline__ (?P<result>[\w:]+)[ *&]+(?P<name>\w+)\([^;{}]*?\{\n)"
    r"(?P<body>.*?\n)(?P<end>\}\n)",
    re.MULTILINE | re.DOTALL,
)
_COMMENTS_BEFORE = re.compile(r"(?:^//[^\n]*\n)*\Z", re.MULTILINE)
_CALL = "    chaos_sleep();\n"


def plant(text: str, seed: int) -> str:
    """`text` with the sleeps; as it is if it has no barrier. The seed (1 to 2^32 - 1) enters their lengths."""
    if not 0 < seed < 1 << 32:
        raise ValueError(f"chaos: got {seed}, expected 1 to {(1 << 32) - 1}")
    elected = _elected(text)
    first = next((m.start() for m in _FUNCTION.finditer(text) if _has(TOGETHER + ELECTED, m["body"])), None)
    if first is None:
        return text
    comments = _COMMENTS_BEFORE.search(text, 0, first)
    place = comments.start() if comments else first
    rest = _before_calls(_FUNCTION.sub(_sleepy, text[place:]), elected)
    return text[:place] + SLEEP.format(seed=seed) + rest


def _has(instructions: tuple[str, ...], body: str) -> bool:
    return any(
        f'"{instruction}' in body or f"\\n@p {instruction}" in body or f'"@p {instruction}' in body
        for instruction in instructions
    )


def _elected(text: str) -> set[str]:
    """Names of functions with an ELECTED instruction, and of those that elect no lane before they call them."""
    functions = list(_FUNCTION.finditer(text))
    names = {match["name"] for match in functions if _has(ELECTED, match["body"])}
    together = {match["name"] for match in functions if _has(TOGETHER, match["body"])}
    for match in functions:  # in the order of their text, so callers come after
        called = set(re.findall(r"\b(\w+)\(", match["body"]))
        if called & names and not called & together and "if (" not in match["body"]:
            names.add(match["name"])
    return names


def _sleepy(match: re.Match[str]) -> str:
    if not _has(TOGETHER, match["body"]):
        return match[0]
    after = _CALL if match["result"] == "void" else ""
    return match["head"] + _CALL + match["body"] + after + match["end"]


def _before_calls(text: str, names: set[str]) -> str:
    """A sleep before each statement that begins with a call of one of `names`, outside of its `if`."""
    lines = text.splitlines(keepends=True)
    call = re.compile(rf"\s+(?:{'|'.join(sorted(names))})\(") if names else None
    inside = _within(lines, names)
    calls = (n for n, line in enumerate(lines) if call and call.match(line) and n not in inside)
    places = {_outside(lines, number) for number in calls}
    for number in sorted(places, reverse=True):
        lines.insert(number, " " * (_indent(lines[number]) - 4) + _CALL)
    return "".join(lines)


def _within(lines: list[str], names: set[str]) -> set[int]:
    """Numbers of the lines in the bodies of the functions `names`: there a lane is elected already."""
    found, name = set(), ""
    for number, line in enumerate(lines):
        if line.startswith("__device__") and (match := re.search(r"(\w+)\(", line)):
            name = match[1]
        if name in names and _indent(line):
            found.add(number)
    return found


def _outside(lines: list[str], number: int) -> int:
    """The line to put a statement before so that it runs before line `number`, under no condition of its own."""
    while True:
        opening = next(
            n
            for n in range(number - 1, -1, -1)
            if lines[n].strip() and _indent(lines[n]) < _indent(lines[number])
        )
        if not lines[opening].lstrip().startswith("if ("):
            return number
        number = opening


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
