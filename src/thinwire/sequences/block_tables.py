"""Block tables of shared attention: the rank that computes each block of causal scores, and what travels for it.

A sequence has parts; block (i, j) holds the scores of part i's queries and part j's keys, j <= i. A table gives each
block a rank and a step. Messages follow: keys and values go to the queries, or queries to the keys and results back.
A `SequencePlan` puts an exchange of heads around a table. Imports no torch, so that the planner counts the same bytes.

References:
    Ring: arXiv 2105.13120, with partial results merged by their log-sum-exp in place of rows of scores. Helper: arXiv
    2310.03294, section 3.1. Heads: arXiv 2309.14509. Two levels: arXiv 2510.18830, section 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from thinwire.errors import refusal, unknown_name

POLICIES = ("auto", "ring", "zigzag", "helper", "two-level", "heads", "heads+sites")
_OF_SITES = ("two-level", "heads+sites")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Scores of the queries of one part and the keys of another, not later one."""

    row: int  # part of the queries
    column: int  # part of the keys
    rank: int  # computes it
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage:
    """Tensors of one part on their way between two ranks."""

    kind: str  # keys (and values), queries, result, rows, row-gradient or key-gradient
    part: int
    source: int
    target: int
    posted: int  # step before whose blocks it is given to the network
    step: int  # step before whose blocks it has arrived


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Assignment of the blocks of a causal score matrix to ranks and steps."""

    owners: tuple[int, ...]  # rank that holds each part
    sites: tuple[int, ...]  # site of each rank
    blocks: tuple[AttentionBlock, ...]
    # rank that hands (rank, part) its keys and values, where that is not the owner; it has them a step earlier
    suppliers: Mapping[tuple[int, int], int] = field(default_factory=dict)
    keeps_border: bool = True  # keys that crossed a border are kept for the backward pass, for 2 N / sites of memory

    @property
    def num_ranks(self) -> int:
        return len(self.sites)

    @cached_property
    def num_steps(self) -> int:
        """Steps in which blocks are computed."""
        return 1 + max(block.step for block in self.blocks)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Blocks that each rank computes; one on the diagonal counts half."""
        found = [0.0] * self.num_ranks
        for block in self.blocks:
            found[block.rank] += 0.5 if block.row == block.column else 1.0
        return tuple(found)

    @cached_property
    def idle_slots(self) -> int:
        """Pairs of a rank and a step without a block, while others compute."""
        busy = {(block.rank, block.step) for block in self.blocks}
        return self.num_ranks * self.num_steps - len(busy)

    @cached_property
    def forward(self) -> tuple[BlockMessage, ...]:
        """Messages of the forward pass, in the order of their steps."""
        found = [*self._keys(), *self._rows("queries")]
        found += self._returns("result")
        return _in_order(found)

    @cached_property
    def backward(self) -> tuple[BlockMessage, ...]:
        """Messages of the backward pass; keys that were not kept travel again."""
        found = [message for message in self._keys() if not self.is_kept(message)]
        found += [*self._rows("rows"), *self._returns("row-gradient"), *self._key_gradients()]
        return _in_order(found)

    def is_border(self, message: BlockMessage) -> bool:
        """Return whether a message goes from one site to another."""
        return self.sites[message.source] != self.sites[message.target]

    def is_kept(self, message: BlockMessage) -> bool:
        """Return whether what arrives is kept for the backward pass."""
        return self.keeps_border and message.kind == "keys" and self.is_border(message)

    def only(self, needed: Collection[tuple[int, int]]) -> BlockTable:
        """Return the table without blocks that are not needed, and without what would travel for them alone."""
        blocks = [block for block in self.blocks if (block.row, block.column) in needed]
        # a supplier receives a part as long as a rank behind it needs it
        held = {(block.rank, block.column) for block in blocks}
        suppliers = {key: rank for key, rank in self.suppliers.items() if (rank, key[1]) in held}
        return replace(self, blocks=tuple(blocks), suppliers=suppliers)

    @cached_property
    def _used(self) -> dict[tuple[int, int], tuple[int, int]]:
        """First and last step in which a rank uses the keys of a part, by (rank, part)."""
        return _spans((block.rank, block.column, block.step) for block in self.blocks)

    @cached_property
    def _helped(self) -> dict[tuple[int, int], tuple[int, int]]:
        """First and last step in which a rank computes for a part of queries that another one holds."""
        return _spans(
            (block.rank, block.row, block.step) for block in self.blocks if self.owners[block.row] != block.rank
        )

    def _supplier(self, rank: int, part: int) -> int:
        return self.suppliers.get((rank, part), self.owners[part])

    def _keys(self) -> Iterable[BlockMessage]:
        for (rank, part), (first, _) in self._used.items():
            source = self._supplier(rank, part)
            if self.owners[part] != rank:
                # what crosses a border starts at once and is hidden behind the steps before it is needed
                is_early = source == self.owners[part] and self.sites[source] != self.sites[rank]
                yield BlockMessage(
                    kind="keys", part=part, source=source, target=rank, posted=1 if is_early else first, step=first
                )

    def _rows(self, kind: str) -> Iterable[BlockMessage]:
        for (rank, part), (first, _) in self._helped.items():
            yield BlockMessage(
                kind=kind, part=part, source=self.owners[part], target=rank, posted=first, step=max(1, first)
            )

    def _returns(self, kind: str) -> Iterable[BlockMessage]:
        for (rank, part), (_, last) in self._helped.items():
            # the next step's messages leave before this step's blocks are computed
            posted = last + 2
            step = max(posted, self.num_steps)
            yield BlockMessage(kind=kind, part=part, source=rank, target=self.owners[part], posted=posted, step=step)

    def _key_gradients(self) -> Iterable[BlockMessage]:
        arrived: dict[tuple[int, int], int] = {}
        # ranks that others are behind add up what these return
        behind = sorted(self._used, key=lambda key: self._supplier(*key) == self.owners[key[1]])
        for rank, part in behind:
            if self.owners[part] == rank:
                continue
            source = self._supplier(rank, part)
            posted = max(self._used[rank, part][1] + 2, arrived.get((rank, part), 0) + 1)
            step = max(posted, self.num_steps) if self.sites[source] != self.sites[rank] else posted
            arrived[source, part] = max(step, arrived.get((source, part), 0))
            yield BlockMessage(kind="key-gradient", part=part, source=rank, target=source, posted=posted, step=step)


def _in_order(messages: Iterable[BlockMessage]) -> tuple[BlockMessage, ...]:
    return tuple(sorted(messages, key=lambda one: (one.posted, one.step, one.part, one.source, one.target, one.kind)))


def _spans(uses: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, part, step in uses:
        first, last = found.get((rank, part), (step, step))
        found[rank, part] = min(first, step), max(last, step)
    return found


def ring(sites: Sequence[int]) -> BlockTable:
    """Return the ring that sends needed blocks alone: rank r computes the rows of part r."""
    blocks = [
        AttentionBlock(row=row, column=column, rank=row, step=row - column)
        for row in range(len(sites)) for column in range(row + 1)
    ]  # fmt: skip
    return BlockTable(owners=tuple(range(len(sites))), sites=tuple(sites), blocks=tuple(blocks))


def zigzag(sites: Sequence[int]) -> BlockTable:
    """Return the ring over parts r and 2 P - 1 - r of rank r: an early and a late one, so that all compute alike."""
    ranks = range(len(sites))
    return _ring_over((*ranks, *reversed(ranks)), sites)


def striped(sites: Sequence[int], *, parts: int) -> BlockTable:
    """Return the ring over so many parts of each rank, dealt out in turn: small ones, of which queries may need few."""
    return _ring_over(tuple(range(len(sites))) * parts, sites)


def _ring_over(owners: tuple[int, ...], sites: Sequence[int]) -> BlockTable:
    blocks = [
        AttentionBlock(row=row, column=column, rank=owners[row], step=(owners[row] - owners[column]) % len(sites))
        for row in range(len(owners)) for column in range(row + 1)
    ]  # fmt: skip
    return BlockTable(owners=owners, sites=tuple(sites), blocks=tuple(blocks))


def helper(sites: Sequence[int]) -> BlockTable:
    """Return the balanced ring: in step t ranks r >= t take keys of rank r - t, and the others help with queries."""
    ranks = len(sites)
    blocks = []
    for step in range(ranks // 2 + 1):
        for rank in range(ranks):
            if rank >= step:
                blocks.append(AttentionBlock(row=rank, column=rank - step, rank=rank, step=step))
            elif 2 * step != ranks:  # an even number of ranks: the lower half has nothing to help with
                blocks.append(AttentionBlock(row=rank - step + ranks, column=rank, rank=rank, step=step))
    return BlockTable(owners=tuple(range(ranks)), sites=tuple(sites), blocks=tuple(blocks))


def keys_at_home(sites: Sequence[int]) -> BlockTable:
    """Return the ring in which queries cross borders in place of keys."""
    plain = ring(sites)
    blocks = [
        block if sites[block.row] == sites[block.column]
        else AttentionBlock(row=block.row, column=block.column, rank=block.column, step=block.step)
        for block in plain.blocks
    ]  # fmt: skip
    return BlockTable(owners=plain.owners, sites=plain.sites, blocks=tuple(blocks))


def two_level(sites: Sequence[int]) -> BlockTable:
    """Return rings inside sites of equally many ranks: a part enters each other site once, and is handed on there."""
    size = sites_of_equal_size(sites, policy="two-level")
    blocks, suppliers = [], {}
    for rank in range(len(sites)):
        site, place = divmod(rank, size)
        for before in range(site + 1):
            for shift in range(size):
                column = (site - before) * size + (place - shift) % size
                if column > rank:
                    continue
                blocks.append(AttentionBlock(row=rank, column=column, rank=rank, step=before * size + shift))
                if before and shift:
                    suppliers[rank, column] = site * size + (place - shift) % size
    return BlockTable(
        owners=tuple(range(len(sites))), sites=tuple(sites), blocks=tuple(blocks), suppliers=suppliers
    )  # fmt: skip


def sites_of_equal_size(sites: Sequence[int], *, policy: str) -> int:
    """Return the ranks of a site, where all have equally many and those of a site follow each other.

    Raises:
        ValueError: They do not.
    """
    size = sites.count(sites[0])
    wanted = [site for site in dict.fromkeys(sites) for _ in range(size)]
    if list(sites) != wanted:
        raise refusal(
            f"{policy} needs sites of equally many ranks, one site after another", got=",".join(map(str, sites)),
            allowed="such as 0,0,1,1", remedy="--cp-policy ring",
        )  # fmt: skip
    return size


_TABLES = {"ring": ring, "zigzag": zigzag, "helper": helper, "two-level": two_level, "keys-at-home": keys_at_home}


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Sharing of each sequence over ranks: heads are exchanged inside groups, and blocks are shared between them.

    Member p of every group has the same heads, so the table's ranks stand for the groups, once for each place.
    """

    policy: str
    sites: tuple[int, ...]  # of each rank
    heads: int  # of the queries
    kv_heads: int
    group_size: int  # ranks that exchange heads
    table: BlockTable  # between groups

    @property
    def num_ranks(self) -> int:
        return len(self.sites)

    @property
    def num_parts(self) -> int:
        """Equal parts into which a sequence is cut."""
        return len(self.table.owners) * self.group_size

    def heads_of(self, place: int) -> tuple[range, range]:
        """Return the heads that the member at a place of each group computes: of queries, and of keys and values."""
        own = self.heads // self.group_size
        shared = self.heads // self.kv_heads
        queries = range(place * own, (place + 1) * own)
        return queries, range(queries.start // shared, -(-queries.stop // shared))

    def slices(self, seq_len: int, rank: int) -> tuple[range, ...]:
        """Return the positions of a sequence that a rank holds, one range a part of its group.

        Raises:
            ValueError: The length is not divided by the number of parts.
        """
        if seq_len < 1 or seq_len % self.num_parts:
            following = max(1, -(-seq_len // self.num_parts)) * self.num_parts
            raise refusal(
                f"{self.policy} over {self.num_ranks} ranks cuts a sequence into {self.num_parts} equal parts",
                got=f"{seq_len} positions", allowed=f"multiples of {self.num_parts}",
                remedy=f"{following} positions, padded at the end",
            )  # fmt: skip
        group, place = divmod(rank, self.group_size)
        size = seq_len // self.num_parts
        starts = [
            (part * self.group_size + place) * size for part, owner in enumerate(self.table.owners) if owner == group
        ]
        return tuple(range(start, start + size) for start in starts)

    def sent_bytes(
        self, *, batch: int, seq_len: int, head_dim: int, item_bytes: int, log_sum_bytes: int = 4,
        backward: bool = False,
    ) -> dict[tuple[int, int], int]:  # fmt: skip
        """Return the bytes that a pass of one layer sends, by (source, target).

        Args:
            batch: Sequences.
            seq_len: Positions of each, over all ranks.
            head_dim: Width of a head.
            item_bytes: Of a number.
            log_sum_bytes: Of a log-sum-exp, one for each position and head.
            backward: The backward pass, in place of the forward pass.
        """
        found: dict[tuple[int, int], int] = {}
        width = batch * head_dim * item_bytes
        part = seq_len // len(self.table.owners)
        for place in range(self.group_size):
            queries, keys = (len(own) for own in self.heads_of(place))
            row, log_sums = part * queries * width, part * queries * batch * log_sum_bytes
            pair = 2 * part * keys * width
            sizes = {"keys": pair, "key-gradient": pair, "queries": row, "row-gradient": row, "result": row + log_sums,
                     "rows": 3 * row + log_sums}  # fmt: skip
            for message in self.table.backward if backward else self.table.forward:
                way = tuple(group * self.group_size + place for group in (message.source, message.target))
                found[way[0], way[1]] = found.get((way[0], way[1]), 0) + sizes[message.kind]
        own = seq_len // self.num_ranks
        for rank in range(self.num_ranks if self.group_size > 1 else 0):
            group, place = divmod(rank, self.group_size)
            for other in range(self.group_size):
                if other != place:
                    there, here = ([len(own) for own in self.heads_of(one)] for one in (other, place))
                    # queries, keys and values (or the result's gradient) go to the heads; results come back
                    outward, homeward = there[0] + 2 * there[1], here[0]
                    if backward:
                        outward, homeward = there[0], here[0] + 2 * here[1]
                    way = rank, group * self.group_size + other
                    found[way] = found.get(way, 0) + own * width * (outward + homeward)
        return found

    def border_bytes(self, sent: Mapping[tuple[int, int], int]) -> int:
        """Return how many of the bytes by (source, target) go from one site to another."""
        return sum(count for (source, target), count in sent.items() if self.sites[source] != self.sites[target])

    @property
    def work(self) -> tuple[float, ...]:
        """Share of the whole attention's arithmetic that each rank computes."""
        total = sum(self.table.work)
        return tuple(
            self.table.work[rank // self.group_size] / self.group_size / total for rank in range(self.num_ranks)
        )


def sequence_plan(
    policy: str, *, sites: Sequence[int], heads: int, kv_heads: int | None = None, head_dim: int = 128
) -> SequencePlan:
    """Return the plan of a policy on ranks, of which each has its site.

    `auto` takes the plan with the fewest bytes between sites, of these the one whose busiest rank computes least, and
    of these the one with the fewest bytes.

    Args:
        policy: One of `POLICIES`.
        sites: Number of each rank's site.
        heads: Of the queries.
        kv_heads: Of keys and values. Default: as many.
        head_dim: Width of a head, for the bytes that `auto` compares.

    Raises:
        ValueError: There is no such policy, or it does not fit the ranks or the heads; names the remedy.

    Example:
        >>> sequence_plan("auto", sites=[0, 0, 1, 1], heads=4).policy
        'heads+sites'
        >>> sequence_plan("auto", sites=[0] * 4, heads=4, kv_heads=1).policy
        'zigzag'
    """
    if not sites:
        raise refusal("sequences are shared by ranks", got="no sites", allowed="one number a rank", remedy="sites=[0]")
    kv_heads = heads if kv_heads is None else kv_heads
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise refusal("heads of queries must be a multiple of those of keys", got=f"{heads} and {kv_heads}",
                      allowed="such as 8 and 2", remedy=f"kv_heads={heads}")  # fmt: skip
    if policy not in (*POLICIES, "keys-at-home"):
        raise unknown_name("sequence policy", policy, POLICIES)
    if policy != "auto":
        return _plan(policy, tuple(sites), heads, kv_heads)
    found = []
    for name in POLICIES[1:]:
        if name in _OF_SITES and len(set(sites)) == 1:
            continue  # as ring and heads
        try:
            plan = _plan(name, tuple(sites), heads, kv_heads)
        except ValueError:
            continue
        passes = [
            plan.sent_bytes(batch=1, seq_len=2 * plan.num_ranks, head_dim=head_dim, item_bytes=2, backward=backward)
            for backward in (False, True)
        ]
        border = sum(map(plan.border_bytes, passes))
        found.append((border, round(max(plan.work), 9), sum(sum(sent.values()) for sent in passes), plan))
    return min(found, key=lambda one: one[:3])[3]


def _plan(policy: str, sites: tuple[int, ...], heads: int, kv_heads: int) -> SequencePlan:
    if policy not in ("heads", "heads+sites"):
        table, size = _TABLES[policy](sites), 1
    else:
        size = len(sites) if policy == "heads" else sites_of_equal_size(sites, policy=policy)
        if heads % size or (kv_heads % size and size % kv_heads):
            both = [n for n in range(1, size + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
            raise refusal(
                f"{policy} shares the heads evenly over the ranks of a group",
                got=f"{heads} heads, {kv_heads} of keys, on {size} ranks",
                allowed=f"{', '.join(map(str, both))} ranks", remedy="--cp-policy auto",
            )  # fmt: skip
        table = ring(sites[::size])
    return SequencePlan(
        policy=policy, sites=sites, heads=heads, kv_heads=kv_heads, group_size=size, table=table
    )  # fmt: skip


def overlapped_s(num_steps: int, *, compute_s: float, transfer_s: float) -> float:
    """Return the time of a ring's steps, whose transfers are hidden behind computing as well as they can be.

    Example:
        >>> round(1.13 + 2.08 + overlapped_s(32, compute_s=0.51, transfer_s=0.98), 2)  # ms; arXiv 2510.18830, figure 7
        34.1
    """
    return (num_steps - 1) * max(compute_s, transfer_s) + compute_s


def score_numbers(*, heads: int, head_dim: int, seq_len: int, ranks: int, is_merged: bool) -> float:
    """Return the numbers of a sequence that attention keeps on a rank between its two passes.

    RSA keeps the scores of whole rows, (heads, own positions, all positions). Merged partial results keep the output
    and a log-sum-exp for each position and head.

    Reference:
        arXiv 2105.13120, table 2: the term B Z L^2 / N.
    """
    own = heads * seq_len / ranks
    return own * (head_dim + 1) if is_merged else own * seq_len
