"""Table 2 as the paper prints it. Its KAO_QKV counts the mean once for each axis."""

from __future__ import annotations

__all__ = ["PRINTED"]

_COLUMNS = ("madd", "cost_saving", "memory", "memory_saving", "time", "speedup")
_ROWS = {
    (14, "attn"): ("0.63m", "0.00%", "5.2MB", "0.00%", "5.8ms", "1.0×"),
    (14, "attn_pool"): ("0.16m", "75.00%", "1.5MB", "71.65%", "2.0ms", "3.0×"),
    (14, "kao_kv"): ("0.09m", "85.71%", "0.9MB", "82.03%", "1.7ms", "3.5×"),
    (14, "kao_qkv_as_printed"): ("0.01m", "97.71%", "0.3MB", "95.06%", "0.8ms", "6.8×"),
    (28, "attn"): ("9.88m", "0.00%", "79.9MB", "0.00%", "72.4ms", "1.0×"),
    (28, "attn_pool"): ("2.47m", "75.00%", "20.7MB", "74.13%", "20.9ms", "3.5×"),
    (28, "kao_kv"): ("0.71m", "92.86%", "6.5MB", "91.88%", "7.1ms", "10.1×"),
    (28, "kao_qkv_as_printed"): ("0.05m", "99.46%", "0.9MB", "98.85%", "1.7ms", "40.9×"),
    (56, "attn"): ("157.55m", "0.00%", "1,262.6MB", "0.00%", "1,541.1ms", "1.0×"),
    (56, "attn_pool"): ("39.39m", "75.00%", "318.7MB", "74.76%", "396.9ms", "3.9×"),
    (56, "kao_kv"): ("5.62m", "96.43%", "48.2MB", "96.18%", "49.6ms", "31.1×"),
    (56, "kao_qkv_as_printed"): ("0.21m", "99.87%", "3.4MB", "99.73%", "5.1ms", "305.8×"),
}

# Keyed by the grid and the operator; the batch and the channels are 8 throughout.
PRINTED: dict[tuple[tuple[int, ...], str], dict[str, str]] = {
    ((size, size), operator): dict(zip(_COLUMNS, values, strict=True)) for (size, operator), values in _ROWS.items()
}
