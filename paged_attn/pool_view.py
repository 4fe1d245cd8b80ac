"""Pictures of a pool: a text map, and a plot of blocks, sharing and occupancy."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ._host import BlockManager

EVENT_KINDS = (
    "allocated",
    "shared",
    "released",
    "copied",
    "published",
    "unpublished",
    "evicted",
    "swapped_out",
    "swapped_in",
)

_MAP_WIDTH = 64
_MAP_ROWS = 32
_MAX_SEQUENCES = 100
_OWNER_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijklmnoqrstuvwxyz"  # without c and p: cached, pinned


@dataclass
class PoolSnapshot:
    """Who holds which block at one moment.

    Attributes:
        holders: int32 ``[num_blocks]``: sequences and pins.
        published: bool ``[num_blocks]``: findable by content.
        blocks: the device blocks of each running sequence, in order, -1 where released.
        lengths: tokens with K/V of each sequence.
        states: "running", "swapped" or "dropped".
        owner: int64 ``[num_blocks]``: index of the first sequence that holds the block, -1 for none.
    """

    holders: np.ndarray
    published: np.ndarray
    blocks: dict[Hashable, np.ndarray] = field(default_factory=dict)
    lengths: dict[Hashable, int] = field(default_factory=dict)
    states: dict[Hashable, str] = field(default_factory=dict)
    owner: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of(cls, manager: BlockManager, handles: dict[Hashable, int]) -> PoolSnapshot:
        snapshot = cls(*manager.snapshot())
        snapshot.owner = np.full(len(snapshot.holders), -1, dtype=np.int64)
        for i, (seq_id, handle) in enumerate(handles.items()):
            snapshot.states[seq_id] = manager.state(handle)
            snapshot.lengths[seq_id] = manager.length(handle)
            if snapshot.states[seq_id] != "running":
                continue
            snapshot.blocks[seq_id] = blocks = manager.blocks(handle)
            held = blocks[blocks >= 0]
            snapshot.owner[held[snapshot.owner[held] < 0]] = i
        return snapshot


def _runs(ids: np.ndarray) -> str:
    """``0-3 7 - 9`` for 0, 1, 2, 3, 7, -1, 9."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i < len(ids) and ids[i - 1] >= 0 and ids[i] == ids[i - 1] + 1:
            continue
        first, last = ids[start], ids[i - 1]
        parts.append("-" if first < 0 else str(first) if first == last else f"{first}-{last}")
        start = i
    return " ".join(parts)


def describe(snapshot: PoolSnapshot) -> str:
    """A text map of the pool, then what each sequence holds."""
    num_blocks = len(snapshot.holders)
    letters = np.array([*_OWNER_LETTERS, "."])
    symbols = letters[snapshot.owner % len(_OWNER_LETTERS)]
    symbols[(snapshot.holders > 0) & (snapshot.owner < 0)] = "p"
    symbols[snapshot.holders > 1] = "#"
    symbols[snapshot.holders == 0] = "."
    symbols[(snapshot.holders == 0) & snapshot.published] = "c"

    used = int((snapshot.holders > 0).sum())
    cached = int(((snapshot.holders == 0) & snapshot.published).sum())
    shared = int((snapshot.holders > 1).sum())
    lines = [
        f"{num_blocks} blocks: {used} used ({shared} shared), {num_blocks - used} free ({cached} of them cached)",
        "a letter: its only holder, #: shared, p: pinned, c: cached and free, .: free",
    ]
    shown = min(num_blocks, _MAP_WIDTH * _MAP_ROWS)
    for start in range(0, shown, _MAP_WIDTH):
        lines.append(f"{start:>8}  {''.join(symbols[start : min(start + _MAP_WIDTH, shown)])}")
    if shown < num_blocks:
        lines.append(f"          ... {num_blocks - shown} more blocks")
    for i, (seq_id, state) in enumerate(snapshot.states.items()):
        if i == _MAX_SEQUENCES:
            lines.append(f"... {len(snapshot.states) - i} more sequences")
            break
        letter = _OWNER_LETTERS[i % len(_OWNER_LETTERS)]
        what = _runs(snapshot.blocks[seq_id]) if state == "running" else state
        lines.append(f"{letter} {seq_id!r}: {snapshot.lengths[seq_id]} tokens, blocks {what}")
    return "\n".join(lines)


@dataclass
class SharingNode:
    """A run of blocks held by the same sequences, and what follows it in some of them."""

    blocks: list[int]
    seq_ids: list[Hashable]
    children: list[SharingNode] = field(default_factory=list)


def sharing_tree(blocks: dict[Hashable, np.ndarray], start: int = 0) -> list[SharingNode]:
    """Sequences grouped by the blocks they have in common from the first one on."""
    groups: dict[int, dict[Hashable, np.ndarray]] = {}
    for seq_id, ids in blocks.items():
        if start < len(ids):
            groups.setdefault(int(ids[start]), {})[seq_id] = ids
    nodes = []
    for group in groups.values():
        first = next(iter(group.values()))
        end = start + 1
        while end < len(first) and all(end < len(ids) and ids[end] == first[end] for ids in group.values()):
            end += 1
        if len(group) == 1:
            end = len(first)
        children = sharing_tree(group, end) if len(group) > 1 else []
        nodes.append(SharingNode([int(i) for i in first[start:end]], list(group), children))
    return nodes


def occupancy(events: np.ndarray, num_blocks: int) -> dict[str, np.ndarray]:
    """Replay an event log from the empty pool.

    Returns:
        ``used``, ``shared`` and ``cached`` (findable and free): int64 ``[num_events + 1]``, before the first event and
        after each; ``holders`` and ``published``: ``[num_blocks]`` after the last.
    """
    kinds = {name: number for number, name in enumerate(EVENT_KINDS)}
    holders = np.zeros(num_blocks, dtype=np.int32)
    published = np.zeros(num_blocks, dtype=bool)
    used, shared, cached = (np.zeros(len(events) + 1, dtype=np.int64) for _ in range(3))
    change = {kinds["allocated"]: 1, kinds["shared"]: 1, kinds["released"]: -1}
    for i, (kind, block) in enumerate(zip(events["kind"].tolist(), events["block"].tolist())):
        before = (holders[block] > 0, holders[block] > 1, holders[block] == 0 and published[block])
        holders[block] += change.get(kind, 0)
        if kind == kinds["published"]:
            published[block] = True
        elif kind in (kinds["unpublished"], kinds["evicted"]):
            published[block] = False
        after = (holders[block] > 0, holders[block] > 1, holders[block] == 0 and published[block])
        for series, old, new in zip((used, shared, cached), before, after):
            series[i + 1] = series[i] + int(new) - int(old)
    return {"used": used, "shared": shared, "cached": cached, "holders": holders, "published": published}


def plot(snapshot: PoolSnapshot, events: np.ndarray, path: str | Path) -> None:
    """Save a picture: the blocks, the sharing tree and, where there are events, the occupancy over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_panels = 2 + (len(events) > 0)
    num_leaves = max(1, len(snapshot.blocks))
    heights = [4.0, max(1.5, 0.22 * min(num_leaves, 60)), 2.5][:num_panels]
    figure = Figure(figsize=(9, sum(heights) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_panels, 1, height_ratios=heights, squeeze=False)[:, 0]
    _plot_blocks(axes[0], snapshot)
    _plot_tree(axes[1], snapshot)
    if len(events):
        _plot_occupancy(axes[2], occupancy(events, len(snapshot.holders)), len(snapshot.holders))
    figure.savefig(path)


def _palette() -> np.ndarray:
    """RGB rows for owners: no grey, which means cached."""
    from matplotlib import colormaps

    return np.delete(np.array(colormaps["tab20"].colors), (14, 15), axis=0)


def _plot_blocks(axes: Any, snapshot: PoolSnapshot) -> None:
    """A cell a block: colours for owners, dark for shared ones, light grey for cached, white for free."""
    from matplotlib.patches import Patch

    num_blocks = len(snapshot.holders)
    palette = _palette()
    shared_colour, pinned_colour, cached_colour = (0.1, 0.1, 0.1), (0.45, 0.25, 0.1), (0.82, 0.82, 0.82)
    width = int(np.ceil(np.sqrt(num_blocks * 2.2)))
    cells = np.ones((-(-num_blocks // width) * width, 3))
    colours = cells[:num_blocks]
    colours[:] = palette[snapshot.owner % len(palette)]
    colours[(snapshot.holders > 0) & (snapshot.owner < 0)] = pinned_colour
    colours[snapshot.holders > 1] = shared_colour
    colours[snapshot.holders == 0] = 1.0
    colours[(snapshot.holders == 0) & snapshot.published] = cached_colour
    cells[num_blocks:] = 0.95
    axes.imshow(cells.reshape(-1, width, 3), interpolation="nearest", aspect="auto")
    axes.set(title=f"{num_blocks} blocks", yticks=[], xlabel=f"block id, {width} a row")
    if num_blocks <= 1024:
        axes.set_xticks(np.arange(-0.5, width), minor=True)
        axes.set_yticks(np.arange(-0.5, len(cells) // width), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    legend = [
        Patch(facecolor=palette[0], label="one holder (a colour each)"),
        Patch(facecolor=shared_colour, label="shared"),
        Patch(facecolor=pinned_colour, label="pinned"),
        Patch(facecolor=cached_colour, label="cached, free"),
        Patch(facecolor="white", edgecolor="grey", label="free"),
    ]
    axes.legend(handles=legend, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=8)


def _plot_tree(axes: Any, snapshot: PoolSnapshot) -> None:
    """Bars from the first block on: a bar that spans several rows is shared by the sequences of these rows."""
    palette = _palette()
    number = {seq_id: i for i, seq_id in enumerate(snapshot.states)}
    row = 0

    def draw(nodes: list[SharingNode], start: int) -> None:
        nonlocal row
        for node in nodes:
            top = row
            draw(node.children, start + len(node.blocks))
            row = max(row, top + len(node.seq_ids))
            is_shared = len(node.seq_ids) > 1
            colour = (0.1, 0.1, 0.1) if is_shared else palette[number[node.seq_ids[0]] % len(palette)]
            axes.barh(
                (top + row - 1) / 2,
                len(node.blocks),
                height=row - top - 0.15,
                left=start,
                color=colour,
                edgecolor="white",
            )
            going_on = {seq_id for child in node.children for seq_id in child.seq_ids}
            ending = ", ".join(str(seq_id) for seq_id in node.seq_ids if seq_id not in going_on)
            axes.text(start + len(node.blocks), row - 1, f" {ending}", va="center", fontsize=7)

    draw(sharing_tree(snapshot.blocks), 0)
    axes.set(title="sharing: a dark bar belongs to every sequence beside it", xlabel="block of the sequence", yticks=[])
    axes.set_ylim(max(row, 1) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _plot_occupancy(axes: Any, series: dict[str, np.ndarray], num_blocks: int) -> None:
    steps = np.arange(len(series["used"]))
    axes.stackplot(
        steps,
        series["used"] - series["shared"],
        series["shared"],
        series["cached"],
        labels=("one holder", "shared", "cached, free"),
        colors=("#4878a8", "#1a1a1a", "#d0d0d0"),
        step="post",
    )
    axes.axhline(num_blocks, color="grey", linewidth=0.8)
    axes.set(title="occupancy", xlabel="event", ylabel="blocks", xlim=(0, max(len(steps) - 1, 1)))
    axes.legend(loc="upper left", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
