"""The encoding of trajectories as bytes: compact, versioned and without pickle.

Invariants:
- `decode(encode(t))` has equal arrays, spans and temperature; the same trajectory always has the same bytes.
- Damaged or foreign input raises CodecError and takes at most `MAX_BYTES` of memory: frames contain a checksum of their
  content.

Layout (little endian) inside one zstandard frame: `TRJ`, format byte, temperature f8, number of rows u4; per row:
tokens u4, spans u4; per span: start, end, epoch (its highest bit: stale keys and values), step u4 each; then tokens
i4[T], log-probabilities f4[T], loss mask one bit each, padded to a byte; then the number of runs of kinds
u4 (0xFFFFFFFF: the row has none), and per run: kind u4, tokens u4.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from headrace.buffer.errors import CodecError
from headrace.buffer.trajectories.sanitizer import plain_float, plain_int
from headrace.buffer.trajectories.token_kinds import KINDS, KindRuns, from_runs, to_runs
from headrace.buffer.trajectories.types import Row, Trajectory, VersionSpan

FORMAT = 1
MAX_BYTES = 1 << 30
MAX_STORED_BYTES = 900_000_000
"""Limit before compression; SQLite accepts a blob of at most 1e9 bytes (https://www.sqlite.org/limits.html)."""
_MAGIC = b"TRJ"
_HEADER = struct.Struct("<3sBdI")
_ROW = struct.Struct("<II")
_RUNS = struct.Struct("<I")
_SPAN_WORDS = 4
_STALE_KV = 1 << 31
_MAX_WORD = (1 << 32) - 1
_LEVEL = 1


def refuse_unstorable(trajectory: Trajectory) -> None:
    """Raise CodecError, TypeError or ValueError unless `encode` accepts the trajectory and `decode` returns an equal
    one."""
    plain_float(trajectory.temperature)
    spans = [span for row in trajectory.rows for span in row.versions]
    size = _HEADER.size + sum(_ROW.size + 9 * len(row.tokens_T) + 1 for row in trajectory.rows)
    size += sum(_RUNS.size + 8 * len(row.tokens_T) * (row.kinds_T is not None) for row in trajectory.rows)
    if (size := size + 4 * _SPAN_WORDS * len(spans)) > MAX_STORED_BYTES:
        raise CodecError(_too_large(size))
    for row in trajectory.rows:
        _refuse_array(row.tokens_T, "iu", np.iinfo(np.int32))
        _refuse_array(row.logprobs_T, "f", np.finfo(np.float32))
        _refuse_array(row.loss_mask_T, "b", None)
        if row.kinds_T is not None:
            _refuse_array(row.kinds_T, "u", np.iinfo(np.uint8))
            if len(row.kinds_T) != len(row.tokens_T) or (row.kinds_T >= KINDS).any():
                raise CodecError(f"the kinds of a row are not one below {KINDS} for each token")
    for span in spans:
        plain_int(span.start, most=_MAX_WORD)
        plain_int(span.end, most=_MAX_WORD)
        plain_int(span.version.epoch, most=_STALE_KV - 1)
        plain_int(span.version.step, most=_MAX_WORD)


def _refuse_array(
    array: object, kinds: str, bounds: np.iinfo[np.int32] | np.iinfo[np.uint8] | np.finfo[np.float32] | None
) -> None:
    """Raise CodecError unless an array is one-dimensional and its numbers are of these kinds and within the bounds of
    the stored type."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
        raise CodecError(f"a row holds {getattr(array, 'dtype', type(array).__name__)} where {kinds!r} is expected")
    if bounds is None or array.dtype == bounds.dtype or not array.size:
        return
    # NaN passes here: counting the trained tokens refuses it.
    if array.max() > bounds.max or array.min() < bounds.min:
        raise CodecError(f"a row holds numbers outside the range of {bounds.dtype}")


def encode(trajectory: Trajectory) -> bytes:
    """Encode a trajectory. Raises CodecError when it is larger than MAX_STORED_BYTES."""
    parts = [_HEADER.pack(_MAGIC, FORMAT, trajectory.temperature, len(trajectory.rows))]
    for row in trajectory.rows:
        spans = [
            (span.start, span.end, span.version.epoch | (_STALE_KV if span.stale_kv else 0), span.version.step)
            for span in row.versions
        ]
        runs: KindRuns = () if row.kinds_T is None else to_runs(row.kinds_T.astype(np.uint8, copy=False))
        parts += [
            _ROW.pack(len(row.tokens_T), len(row.versions)),
            np.asarray(spans, dtype="<u4").tobytes(),
            row.tokens_T.astype("<i4", copy=False).tobytes(),
            row.logprobs_T.astype("<f4", copy=False).tobytes(),
            np.packbits(row.loss_mask_T).tobytes(),
            _RUNS.pack(_MAX_WORD if row.kinds_T is None else len(runs)),
            np.asarray(runs, dtype="<u4").tobytes(),
        ]
    plain = b"".join(parts)
    if len(plain) > MAX_STORED_BYTES:
        raise CodecError(_too_large(len(plain)))
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(plain)


def _too_large(size: int) -> str:
    return f"a trajectory of {size} bytes exceeds {MAX_STORED_BYTES}: lower the token budget of a rollout"


def decode(data: bytes) -> Trajectory:
    """Decode a trajectory. Raises CodecError."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_BYTES:
            raise CodecError("not a readable trajectory: its size is missing or too large")
        plain = zstandard.ZstdDecompressor().decompress(data)
        magic, version, temperature, row_count = _HEADER.unpack_from(plain)
        if (magic, version) != (_MAGIC, FORMAT):
            raise CodecError(
                f"trajectory format {magic!r} {version}, but this version of headrace reads {_MAGIC!r} {FORMAT}"
            )
        rows, offset = [], _HEADER.size
        for _ in range(row_count):
            row, offset = _decode_row(plain, offset)
            rows.append(row)
    except (zstandard.ZstdError, struct.error, ValueError) as error:
        raise CodecError(f"not a readable trajectory: {error}") from error
    if offset != len(plain):
        raise CodecError("not a readable trajectory: there are bytes after the last row")
    return Trajectory(rows=tuple(rows), temperature=temperature)


def _decode_row(plain: bytes, offset: int) -> tuple[Row, int]:
    length, span_count = _ROW.unpack_from(plain, offset)
    offset += _ROW.size
    words = np.frombuffer(plain, "<u4", span_count * _SPAN_WORDS, offset).reshape(span_count, _SPAN_WORDS).tolist()
    offset += span_count * _SPAN_WORDS * 4
    tokens = np.frombuffer(plain, "<i4", length, offset).astype(np.int32)
    logprobs = np.frombuffer(plain, "<f4", length, offset + 4 * length).astype(np.float32)
    packed = np.frombuffer(plain, np.uint8, (length + 7) // 8, offset + 8 * length)
    offset += 8 * length + len(packed)
    spans = tuple(
        VersionSpan.from_plain(start, end, epoch & ~_STALE_KV, step, bool(epoch & _STALE_KV))
        for start, end, epoch, step in words
    )
    mask = np.unpackbits(packed, count=length).astype(np.bool_)
    (runs,) = _RUNS.unpack_from(plain, offset)
    offset += _RUNS.size
    kinds = None
    if runs != _MAX_WORD:
        pairs = np.frombuffer(plain, "<u4", 2 * runs, offset).reshape(runs, 2).tolist()
        offset += 8 * runs
        # Before the array is made: a damaged run may be longer than the memory.
        if sum(count for _, count in pairs) != length:
            raise CodecError("not a readable trajectory: the kinds of a row do not cover its tokens")
        kinds = from_runs(pairs)
    return Row(tokens_T=tokens, loss_mask_T=mask, logprobs_T=logprobs, versions=spans, kinds_T=kinds), offset
