"""Server-sent events from bytes, as the HTML standard defines their parsing. It must not know what the data means."""


class EventSplitter:
    """Cuts a byte stream into the data of its events, however the bytes are cut; comments and other fields vanish.

    Bytes are only split at line ends, so a character that arrives in two pieces stays whole.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        if self._at_start:
            self._at_start = False
            piece = piece.removeprefix(b"\xef\xbb\xbf")
        text = self._rest + piece
        # A CR may be the first half of a CRLF: it waits for the next piece.
        held = b"\r" if text.endswith(b"\r") else b""
        text = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + held
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events
