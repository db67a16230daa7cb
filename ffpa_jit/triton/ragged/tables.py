# mypy: ignore-errors
"""Device side of the plan: from ``cu_seqlens`` to the tables that the score and value phases read.

``scan`` is one program that walks sequences, segments, row tiles and key tiles, with a prefix sum over each; ``expand``
writes what is one value per row or per task. Positions in these tables are int32 words:

    head      invalid, unsafe (see ``kernels``), segments, row tiles, key tiles, slots, tasks, unsafe packs
    segment   first row | first key | first sequence | first row tile | first key tile | boundaries before | kind
    row       a record for each row tile, see ``R_*``          key    a record for each key tile, see ``K_*``
    chunk     first row tile, first task, first slot, first key tile, end of the key tiles of the chunk before
    low, high the keys that a packed row sees, from the first key of its segment
    task      the row tile of each task of a chunk | its key tile, -1 for none

Invalid ``cu_seqlens`` (not beginning at 0, decreasing, beyond the tensor, or with a sequence longer than was said)
leave only the last segment, so that nothing is read or written where it should not be, and a mark that makes all
results NaN.
"""

import triton
import triton.language as tl

from ffpa_jit.triton.params import Band

RECORD = tl.constexpr(16)
CHUNK_RECORD = tl.constexpr(8)

INVALID = tl.constexpr(0)
UNSAFE = tl.constexpr(1)
SEGMENTS = tl.constexpr(2)
ROW_TILES = tl.constexpr(3)
KEY_TILES = tl.constexpr(4)
SLOTS = tl.constexpr(5)
TASKS = tl.constexpr(6)
UNSAFE_PACKS = tl.constexpr(7)

C_ROW_TILE = tl.constexpr(0)
C_TASK = tl.constexpr(1)
C_SLOT = tl.constexpr(2)
C_KEY_TILE = tl.constexpr(3)
C_KEY_TILE_END = tl.constexpr(4)
"""Of the chunk before."""

R_SEGMENT = tl.constexpr(0)
R_ROW = tl.constexpr(1)
"""First row, packed."""
R_ROW_END = tl.constexpr(2)
"""End of the segment's rows, packed."""
R_KEY = tl.constexpr(3)
"""First key of the segment, packed."""
R_KEY_END = tl.constexpr(4)
R_SLOT = tl.constexpr(5)
R_LOW = tl.constexpr(6)
"""First key tile it sees, within the segment."""
R_COUNT = tl.constexpr(7)
"""How many key tiles it sees."""
R_FROM = tl.constexpr(8)
"""First key it sees, within the segment."""
R_TO = tl.constexpr(9)
"""End of the keys it sees."""
R_FULL_FROM = tl.constexpr(10)
"""First key that all of its 128 rows see; -1 if the segment is packed, where there is none."""
R_FULL_TO = tl.constexpr(11)
R_SAMPLE = tl.constexpr(12)
"""Key tile that the row maxima come from."""
R_TASK = tl.constexpr(13)
"""First task of its group."""
R_PLACE = tl.constexpr(14)
"""Its place in its group."""
R_GROUP = tl.constexpr(15)
"""Row tiles of its group."""

K_KEY = tl.constexpr(0)
"""First key, packed."""
K_KEY_END = tl.constexpr(1)
K_TILE = tl.constexpr(2)
"""Its number in the segment."""
K_ROW_TILE = tl.constexpr(3)
"""First row tile of the segment."""
K_ROW_TILE_END = tl.constexpr(4)
K_ROW = tl.constexpr(5)
"""First row of the segment, packed."""
K_ROW_END = tl.constexpr(6)
K_FROM = tl.constexpr(7)
"""First row that sees it, within the segment."""
K_TO = tl.constexpr(8)
K_CUT = tl.constexpr(9)
"""Whether its segment may be cut between chunks."""
K_PACKED = tl.constexpr(10)

S_ROW = tl.constexpr(0)
S_KEY = tl.constexpr(1)
S_SEQUENCE = tl.constexpr(2)
S_ROW_TILE = tl.constexpr(3)
S_KEY_TILE = tl.constexpr(4)
S_BOUNDARIES = tl.constexpr(5)
S_KIND = tl.constexpr(6)
"""0: always whole in a chunk, 1: may be cut, 2: the last segment."""


@triton.jit
def _offsets(cu, i, inside):
    return tl.load(cu + i, mask=inside, other=0).to(tl.int32)


@triton.jit
def _clamp(x, high):
    return tl.minimum(tl.maximum(x, 0), high)


@triton.jit
def _invalid(cu_q, cu_k, sequences, len_q, len_k, max_q, max_k, BLOCK: tl.constexpr):
    wrong = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(0, sequences, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < sequences
        q0, q1 = _offsets(cu_q, i, inside), _offsets(cu_q, i + 1, inside)
        k0, k1 = _offsets(cu_k, i, inside), _offsets(cu_k, i + 1, inside)
        bad = (q0 < 0) | (k0 < 0) | (q1 < q0) | (k1 < k0) | (q1 > len_q) | (k1 > len_k)
        bad |= (q1 - q0 > max_q) | (k1 - k0 > max_k) | ((i == 0) & ((q0 != 0) | (k0 != 0)))
        wrong |= (bad & inside).to(tl.int32)
    return tl.max(wrong, 0)


@triton.jit
def _segments(cu_q, cu_k, segment, size, sequences, len_q, len_k, short, window, BLOCK: tl.constexpr):
    """Where segments begin: first row, first key, first sequence of each; returns how many there are."""
    segments = 0
    for at in tl.range(0, sequences, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < sequences
        q0, q1 = _offsets(cu_q, i, inside), _offsets(cu_q, i + 1, inside)
        k0, k1 = _offsets(cu_k, i, inside), _offsets(cu_k, i + 1, inside)
        q_before, k_before = _offsets(cu_q, i - 1, inside & (i > 0)), _offsets(cu_k, i - 1, inside & (i > 0))
        alone = (q1 - q0 > short) | (k1 - k0 > short)
        alone |= (i == 0) | (q0 - q_before > short) | (k0 - k_before > short)
        begins = inside & (alone | (q0 // window != q_before // window) | (k0 // window != k_before // window))
        count = begins.to(tl.int32)
        to = segment + segments + tl.cumsum(count, 0) - 1
        tl.store(to + S_ROW * size, q0, mask=begins)
        tl.store(to + S_KEY * size, k0, mask=begins)
        tl.store(to + S_SEQUENCE * size, i, mask=begins)
        segments += tl.sum(count, 0)
    last = segment + segments
    tl.store(last + S_ROW * size, tl.load(cu_q + sequences, mask=sequences > 0, other=0).to(tl.int32))
    tl.store(last + S_KEY * size, tl.load(cu_k + sequences, mask=sequences > 0, other=0).to(tl.int32))
    tl.store(last + S_SEQUENCE * size, sequences)
    tl.store(last + 1 + S_ROW * size, len_q)
    tl.store(last + 1 + S_KEY * size, len_k)
    tl.store(last + 1 + S_SEQUENCE * size, sequences)
    return segments + 1


@triton.jit
def _tile_counts(segment, size, row_marks, key_marks, segments, cut_above, fenced, TILE: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """First row tile, first key tile, boundaries and kind of each segment; marks where they begin among the tiles."""
    row_tiles = 0
    key_tiles = 0
    boundaries = 0
    for at in tl.range(0, segments, BLOCK):
        s = at + tl.arange(0, BLOCK)
        inside = s < segments
        here = segment + s
        m = tl.load(here + 1 + S_ROW * size, mask=inside, other=0) - tl.load(here + S_ROW * size, mask=inside, other=0)
        n = tl.load(here + 1 + S_KEY * size, mask=inside, other=0) - tl.load(here + S_KEY * size, mask=inside, other=0)
        m, n = (m + TILE - 1) // TILE, (n + TILE - 1) // TILE
        first_row = row_tiles + tl.cumsum(m, 0) - m
        first_key = key_tiles + tl.cumsum(n, 0) - n
        is_last = s == segments - 1
        big = inside & (m > 0) & (m.to(tl.int64) * tl.maximum(n, 1) > cut_above) & (s < segments - 1)
        boundary = big.to(tl.int32) * fenced
        before = boundaries + tl.cumsum(boundary, 0) - boundary
        tl.store(here + S_ROW_TILE * size, first_row, mask=inside)
        tl.store(here + S_KEY_TILE * size, first_key, mask=inside)
        # A boundary stands before a segment and one behind it.
        tl.store(here + S_BOUNDARIES * size, 2 * before + boundary, mask=inside)
        tl.store(here + S_KIND * size, tl.where(is_last, 2, big.to(tl.int32)), mask=inside)
        tl.atomic_add(row_marks + first_row, 1, mask=inside)
        tl.atomic_add(key_marks + first_key, 1, mask=inside)
        row_tiles += tl.sum(m, 0)
        key_tiles += tl.sum(n, 0)
        boundaries += tl.sum(boundary, 0)
    tl.store(segment + segments + S_ROW_TILE * size, row_tiles)
    tl.store(segment + segments + S_KEY_TILE * size, key_tiles)
    tl.store(segment + segments + S_BOUNDARIES * size, 0)
    tl.store(segment + segments + S_KIND * size, 0)
    return row_tiles, key_tiles


@triton.jit
def _bounds_of(segment, size, s, inside, segments):
    """(first row, rows, first key, keys, whether it is packed, whether it is the last) of segments."""
    here = segment + s
    q0 = tl.load(here + S_ROW * size, mask=inside, other=0)
    k0 = tl.load(here + S_KEY * size, mask=inside, other=0)
    nq = tl.load(here + 1 + S_ROW * size, mask=inside, other=0) - q0
    nk = tl.load(here + 1 + S_KEY * size, mask=inside, other=0) - k0
    sequences = tl.load(here + 1 + S_SEQUENCE * size, mask=inside, other=0)
    sequences -= tl.load(here + S_SEQUENCE * size, mask=inside, other=0)
    return q0, nq, k0, nk, sequences > 1, s == segments - 1


@triton.jit
def _seen_by(row_first, row_last, nq, nk, packed, last, left, right):
    """First key and end of the keys that rows of a segment see between them."""
    at = nk - nq
    low = tl.where(packed, 0, _clamp(row_first + at - left, nk))
    high = tl.where(packed, nk, _clamp(row_last + at + right + 1, nk))
    there = (low < high) & (last == 0)
    return tl.where(there, low, 0), tl.where(there, high, 0)


@triton.jit
def _row_records(segment, size, row, row_marks, segments, row_tiles, left, right, group_rows, unlimited,
                 TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A record for each row tile; returns the numbers of slots and tasks."""
    begun = 0
    slots = 0
    tasks = 0
    for at in tl.range(0, row_tiles, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        inside = tile < row_tiles
        marks = tl.load(row_marks + tile, mask=inside, other=0)
        s = begun + tl.cumsum(marks, 0) - 1
        begun += tl.sum(marks, 0)
        q0, nq, k0, nk, packed, last = _bounds_of(segment, size, s, inside, segments)
        m = tile - tl.load(segment + s + S_ROW_TILE * size, mask=inside, other=0)
        m_tiles = (nq + TILE - 1) // TILE
        first = m * TILE
        end = tl.minimum(first + TILE, nq)
        low, high = _seen_by(first, end - 1, nq, nk, packed, last, left, right)
        low_tile = low // TILE
        count = (high + TILE - 1) // TILE - low_tile

        place = m % group_rows
        group = tl.minimum(group_rows, m_tiles - (m - place))
        group_end = tl.minimum((m - place + group) * TILE, nq)
        _, group_high = _seen_by((m - place) * TILE, group_end - 1, nq, nk, packed, last, left, right)
        # A first row tile may see nothing where a later one does. Its range is then empty at key 0; theirs begin there.
        begin_low, _ = _seen_by((m - place) * TILE, tl.minimum((m - place + 1) * TILE, nq) - 1, nq, nk, packed, last,
                                left, right)  # fmt: skip
        task = group * ((group_high + TILE - 1) // TILE - begin_low // TILE)
        added = tl.where(inside & (place == 0), task, 0)
        first_task = tasks + tl.cumsum(added, 0) - tl.where(place == 0, added, task)
        tasks += tl.sum(added, 0)
        taken = tl.where(inside, tl.maximum(count, 1), 0)
        slot = slots + tl.cumsum(taken, 0) - taken
        slots += tl.sum(taken, 0)

        whole = (packed == 0) & (last == 0) & (end - first == TILE)
        full_low, _ = _seen_by(end - 1, end - 1, nq, nk, packed, last, left, right)
        _, full_high = _seen_by(first, first, nq, nk, packed, last, left, right)
        # The sample: the tile around the rows' own position, or one in proportion where all keys are seen.
        own = _clamp(first + nk - nq, nk) // TILE
        spread = tl.minimum((m.to(tl.int64) * count // tl.maximum(m_tiles, 1)).to(tl.int32), nk // TILE - 1)
        sample = tl.where((left < unlimited) | (right < unlimited), own, spread)
        sample = tl.minimum(tl.maximum(sample, low_tile), low_tile + tl.maximum(count, 1) - 1)

        to = row + tile * RECORD
        tl.store(to + R_SEGMENT, s, mask=inside)
        tl.store(to + R_ROW, q0 + first, mask=inside)
        tl.store(to + R_ROW_END, q0 + nq, mask=inside)
        tl.store(to + R_KEY, k0, mask=inside)
        tl.store(to + R_KEY_END, k0 + nk, mask=inside)
        tl.store(to + R_SLOT, slot, mask=inside)
        tl.store(to + R_LOW, low_tile, mask=inside)
        tl.store(to + R_COUNT, count, mask=inside)
        tl.store(to + R_FROM, low, mask=inside)
        tl.store(to + R_TO, high, mask=inside)
        tl.store(to + R_FULL_FROM, tl.where(packed, -1, full_low), mask=inside)
        tl.store(to + R_FULL_TO, tl.where(whole, full_high, 0), mask=inside)
        tl.store(to + R_SAMPLE, sample, mask=inside)
        tl.store(to + R_TASK, first_task, mask=inside)
        tl.store(to + R_PLACE, place, mask=inside)
        tl.store(to + R_GROUP, group, mask=inside)
    end_record = row + row_tiles * RECORD
    tl.store(end_record + R_SEGMENT, segments)
    tl.store(end_record + R_SLOT, slots)
    tl.store(end_record + R_TASK, tasks)
    tl.store(end_record + R_PLACE, 0)
    return slots, tasks


@triton.jit
def _key_records(segment, size, key, key_marks, segments, key_tiles, left, right, TILE: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    begun = 0
    for at in tl.range(0, key_tiles, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        inside = tile < key_tiles
        marks = tl.load(key_marks + tile, mask=inside, other=0)
        s = begun + tl.cumsum(marks, 0) - 1
        begun += tl.sum(marks, 0)
        q0, nq, k0, nk, packed, last = _bounds_of(segment, size, s, inside, segments)
        here = segment + s
        n = tile - tl.load(here + S_KEY_TILE * size, mask=inside, other=0)
        first = n * TILE
        at_row = nq - nk
        low = tl.where(packed, 0, _clamp(first + at_row - right, nq))
        high = tl.where(packed, nq, _clamp(tl.minimum(first + TILE, nk) + at_row + left, nq))
        there = (low < high) & (last == 0)

        to = key + tile * RECORD
        tl.store(to + K_KEY, k0 + first, mask=inside)
        tl.store(to + K_KEY_END, k0 + nk, mask=inside)
        tl.store(to + K_TILE, n, mask=inside)
        tl.store(to + K_ROW_TILE, tl.load(here + S_ROW_TILE * size, mask=inside, other=0), mask=inside)
        tl.store(to + K_ROW_TILE_END, tl.load(here + 1 + S_ROW_TILE * size, mask=inside, other=0), mask=inside)
        tl.store(to + K_ROW, q0, mask=inside)
        tl.store(to + K_ROW_END, q0 + nq, mask=inside)
        tl.store(to + K_FROM, tl.where(there, low, 0), mask=inside)
        tl.store(to + K_TO, tl.where(there, high, 0), mask=inside)
        kind = tl.load(here + S_KIND * size, mask=inside, other=0)
        tl.store(to + K_CUT, (kind == 1).to(tl.int32), mask=inside)
        tl.store(to + K_PACKED, packed.to(tl.int32), mask=inside)


@triton.jit
def _chunks(segment, size, row, chunk, row_tiles, chunks, stride, steps, BLOCK: tl.constexpr):
    """Where each chunk begins: at the first unit whose slot, and the boundaries before it, reach the chunk's number."""
    for at in tl.range(0, chunks + 1, BLOCK):
        c = at + tl.arange(0, BLOCK)
        inside = c <= chunks
        low = tl.zeros([BLOCK], tl.int32)
        high = low + row_tiles
        for _ in tl.range(0, steps):
            open_ = inside & (low < high)
            middle = (low + high) // 2
            record = row + middle * RECORD
            s = tl.load(record + R_SEGMENT, mask=open_, other=0)
            kind = tl.load(segment + s + S_KIND * size, mask=open_, other=0)
            whole = tl.load(segment + s + S_ROW_TILE * size, mask=open_, other=0)
            unit = tl.where(kind == 0, whole, middle - tl.load(record + R_PLACE, mask=open_, other=0))
            slot = tl.load(row + unit * RECORD + R_SLOT, mask=open_, other=0)
            reached = slot // stride + tl.load(segment + s + S_BOUNDARIES * size, mask=open_, other=0) >= c
            high = tl.where(open_ & reached, middle, high)
            low = tl.where(open_ & (reached == 0), middle + 1, low)
        first = tl.where(c == chunks, row_tiles, low)
        record = row + first * RECORD
        s = tl.load(record + R_SEGMENT, mask=inside, other=0)
        key_first = tl.load(segment + s + S_KEY_TILE * size, mask=inside, other=0)
        within = first > tl.load(segment + s + S_ROW_TILE * size, mask=inside, other=0)
        key_after = tl.load(segment + s + 1 + S_KEY_TILE * size, mask=inside & within, other=0)
        to = chunk + c * CHUNK_RECORD
        tl.store(to + C_ROW_TILE, first, mask=inside)
        tl.store(to + C_TASK, tl.load(record + R_TASK, mask=inside, other=0), mask=inside)
        tl.store(to + C_SLOT, tl.load(record + R_SLOT, mask=inside, other=0), mask=inside)
        tl.store(to + C_KEY_TILE, tl.where(first == 0, 0, key_first), mask=inside)
        tl.store(to + C_KEY_TILE_END, tl.where(within, key_after, key_first), mask=inside)


@triton.jit
def _sum_below(x):
    """``0 + 1 + .. + (x - 1)``, 0 if x is negative. Differences are right where it overflows."""
    x = tl.maximum(x, 0)
    return (x // 2) * (x - 1 + x % 2)


@triton.jit
def band_of(nq, nk, left, right, TILE: tl.constexpr):
    """Which key tiles the row tiles of a sequence see."""
    at = nk - nq
    base = nq // TILE + 2  # keeps divisions off negative numbers, of which they round up
    low = (tl.maximum(at - left, -base * TILE) + base * TILE) // TILE - base
    high = (tl.minimum(at + right, nk) + base * TILE + TILE - 1) // TILE - base + 1
    return Band(low, high, (nk + TILE - 1) // TILE)


@triton.jit
def before(m, band):
    """Slots before row tile ``m``, less its first key tile, counted from where the band's rows begin to see keys.

    For the key side: a load of R_SLOT in its loop would take a stage of the pipeline.
    """
    wide = _sum_below(m + band.high) - _sum_below(m + band.high - band.n_tiles)
    return wide - _sum_below(m + band.low) - tl.maximum(m + band.low, 0)


@triton.jit(do_not_specialize=[
    "sequences", "len_q", "len_k", "max_q", "max_k", "short", "window", "left", "right", "unlimited", "group_rows",
    "cut_above", "fenced", "chunks", "stride", "steps", "size",
])  # fmt: skip
def scan(
    cu_q, cu_k, head, row_marks, key_marks, segment, row, key, chunk, size,
    sequences, len_q, len_k, max_q, max_k, short, window, left, right, unlimited, group_rows, cut_above, fenced, chunks,
    stride, steps,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All tables but those of ``expand``, by one program. ``row_marks`` and ``key_marks`` begin as zeros."""
    invalid = _invalid(cu_q, cu_k, sequences, len_q, len_k, max_q, max_k, BLOCK)
    sequences = tl.where(invalid > 0, 0, sequences)
    segments = _segments(cu_q, cu_k, segment, size, sequences, len_q, len_k, short, window, BLOCK)
    tl.debug_barrier()
    row_tiles, key_tiles = _tile_counts(segment, size, row_marks, key_marks, segments, cut_above, fenced, TILE, BLOCK)
    tl.debug_barrier()
    slots, tasks = _row_records(segment, size, row, row_marks, segments, row_tiles, left, right, group_rows, unlimited,
                                TILE, BLOCK)  # fmt: skip
    _key_records(segment, size, key, key_marks, segments, key_tiles, left, right, TILE, BLOCK)
    tl.debug_barrier()
    _chunks(segment, size, row, chunk, row_tiles, chunks, stride, steps, 128)
    tl.store(head + INVALID, invalid)
    tl.store(head + SEGMENTS, segments)
    tl.store(head + ROW_TILES, row_tiles)
    tl.store(head + KEY_TILES, key_tiles)
    tl.store(head + SLOTS, slots)
    tl.store(head + TASKS, tasks)


@triton.jit(do_not_specialize=["c", "size", "left", "right", "steps", "tasks"])
def expand(
    cu_q, cu_k, segment, row, chunk, low_ptr, high_ptr, task_ptr, c, size, left, right, steps, tasks,
    TILE: tl.constexpr,
):  # fmt: skip
    """For chunk ``c``: the keys that each row sees, and the list of its tasks. A program has a row tile."""
    tile = tl.load(chunk + c * CHUNK_RECORD + C_ROW_TILE) + tl.program_id(0)
    if tile >= tl.load(chunk + (c + 1) * CHUNK_RECORD + C_ROW_TILE):
        return
    record = row + tile * RECORD
    lanes = tl.arange(0, TILE)
    s = tl.load(record + R_SEGMENT)
    rows = tl.load(record + R_ROW) + lanes
    inside = rows < tl.load(record + R_ROW_END)

    # The sequence of each row: the last one of the segment that begins at or before it.
    sequence_first = tl.load(segment + s + S_SEQUENCE * size)
    sequence_end = tl.load(segment + s + 1 + S_SEQUENCE * size)
    sequence = tl.zeros([TILE], tl.int32) + sequence_first
    if sequence_end - sequence_first > 1:
        end = tl.zeros([TILE], tl.int32) + sequence_end
        for _ in tl.range(0, steps):
            middle = (sequence + end) // 2
            later = _offsets(cu_q, middle, inside) <= rows
            sequence = tl.where(later, middle, sequence)
            end = tl.where(later, end, middle)
    known = inside & (sequence_first < sequence_end)
    q0, k0 = _offsets(cu_q, sequence, known), _offsets(cu_k, sequence, known)
    nk = _offsets(cu_k, sequence + 1, known) - k0
    at = rows - q0 + nk - (_offsets(cu_q, sequence + 1, known) - q0)
    key = k0 - tl.load(record + R_KEY)
    tl.store(low_ptr + rows, tl.where(known, key + _clamp(at - left, nk), 0), mask=inside)
    tl.store(high_ptr + rows, tl.where(known, key + _clamp(at + right + 1, nk), 0), mask=inside)

    place, group = tl.load(record + R_PLACE), tl.load(record + R_GROUP)
    low, count = tl.load(record + R_LOW), tl.load(record + R_COUNT)
    begin = tl.load(row + (tile - place) * RECORD + R_LOW)
    final = row + (tile - place + group - 1) * RECORD
    width = tl.load(final + R_LOW) + tl.load(final + R_COUNT) - begin
    to = task_ptr + tl.load(record + R_TASK) - tl.load(chunk + c * CHUNK_RECORD + C_TASK) + place
    for i in tl.range(0, width, TILE):
        n = begin + i + lanes
        seen = (n >= low) & (n < low + count)
        tl.store(to + (i + lanes) * group, tile, mask=i + lanes < width)
        tl.store(to + tasks + (i + lanes) * group, tl.where(seen, n, -1), mask=i + lanes < width)
