"""`servekit` on a machine whose only device is FakeCuda: for running this folder's tests over a device with a queue.

SERVEKIT_TEST_DEVICE=fake-cuda pytest tests/blackbox tests/server
"""

from servekit.engine.device.fake import FakeCuda


def main() -> None:
    """The command line, with graphs as well: attention that can be captured comes first."""
    from servekit.engine import load, load_embedding
    from servekit.engine.attention import select
    from tests.engine.attention.capturable import CapturableAttention

    class Sdpa(CapturableAttention):
        """Under a name that the configuration knows."""

        name = "sdpa"

    for module in (load, load_embedding):
        module.select_device = lambda choice: (FakeCuda(memory=2**30), "for tests")  # type: ignore[attr-defined]
    others = select.attention_backends()
    select.attention_backends = lambda: {**others, "sdpa": Sdpa}
    from servekit.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
