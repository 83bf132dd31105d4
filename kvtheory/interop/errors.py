"""What is wrong with a file of somebody else's."""

from __future__ import annotations

#: characters; what a library says of a broken file may quote the file, and a name in it may have 65,535
LONGEST = 800


class CannotImport(ValueError):
    """The file is not what its name says, is cut short, claims more than it holds, or does not hold what was asked for; one sentence, of at most `LONGEST` characters."""

    def __init__(self, sentence: str) -> None:
        said = " ".join(sentence.split())
        if len(said) > LONGEST:  # where it is and what is wrong stand at the two ends
            said = f"{said[: LONGEST // 2]} ... {said[-(LONGEST // 2 - 5) :]}"
        super().__init__(said)
