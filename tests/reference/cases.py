"""The instances that the shared tests run on; a new codec adds its lines here and gets them all.

OBLIVIOUS: codecs with no state. Laws are what a codec promises beside its bytes: "lossless", "scale" (scaling the data by a power of
two scales what is decoded), "zero" (zero vectors come back as zeros).
"""

import reference

OBLIVIOUS = {
    "Full": reference.Full(),
    **{f"TurboQuant {b}": reference.TurboQuant(b) for b in range(1, 9)},
    "TurboQuant 3 seed 7": reference.TurboQuant(3, seed=7),
    **{f"TurboQuant prod {b}": reference.TurboQuant(b, kind="prod") for b in (1, 2, 3, 8)},
    "TurboQuant haar": reference.TurboQuant(3, rotation="haar"),
    "TurboQuant prod haar": reference.TurboQuant(2, kind="prod", rotation="haar"),
}
#: one of each code path, for tests that take their time
FEW = (
    "Full",
    "TurboQuant 1",
    "TurboQuant 3",
    "TurboQuant 6",
    "TurboQuant prod 1",
    "TurboQuant prod 3",
    "TurboQuant haar",
)
LOSSLESS = ("Full",)
#: the same bytes on every machine, whatever its floating point does
EXACT = tuple(name for name in OBLIVIOUS if "haar" not in name)
