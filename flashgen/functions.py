"""The vocabulary of masks and score functions beside the operators: `fg.where` and its kin."""

from __future__ import annotations

from .trace import PUBLIC

where = PUBLIC["where"]
minimum = PUBLIC["minimum"]
maximum = PUBLIC["maximum"]
abs = PUBLIC["abs"]
exp = PUBLIC["exp"]
exp2 = PUBLIC["exp2"]
log = PUBLIC["log"]
log2 = PUBLIC["log2"]
sqrt = PUBLIC["sqrt"]
rsqrt = PUBLIC["rsqrt"]
sin = PUBLIC["sin"]
cos = PUBLIC["cos"]
tanh = PUBLIC["tanh"]
sigmoid = PUBLIC["sigmoid"]
floor = PUBLIC["floor"]
ceil = PUBLIC["ceil"]
erf = PUBLIC["erf"]
isnan = PUBLIC["isnan"]
