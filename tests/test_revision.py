"""Models of the hub at a revision, and chat templates of a file."""

import json

import huggingface_hub
import pytest

from dflash_jax import serve
from dflash_jax.cli import GenerationOptions, ModelOptions
from dflash_jax.loading import describe, load, pair_sources
from tests import tiny


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of two repositories, and what was asked of it."""
    target = tiny.write_target(tmp_path / "target", tiny.target_config())
    tiny.write_tokenizer(target)
    places = {"owner/target": target, "owner/drafter": tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())}
    asked = []

    def snapshot_download(name, *, revision=None, allow_patterns):
        asked.append((name, revision))
        return str(places[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_both_models_are_of_their_revisions(hub):
    models = ModelOptions(target="owner/target", drafter="owner/drafter", revision="v1", drafter_revision="abc")
    assert load(models, GenerationOptions()).drafter is not None
    assert set(hub) == {("owner/target", "v1"), ("owner/drafter", "abc")}
    hub.clear()
    describe(ModelOptions(target="owner/target"), GenerationOptions())
    assert hub == [("owner/target", None)]
    assert pair_sources(ModelOptions("owner/target", "ngram+owner/drafter", "v1", "v2")) == (
        "owner/target@v1",
        "ngram+owner/drafter@v2",
    )


def test_a_revision_of_what_is_not_on_the_hub(hub, tmp_path):
    for wrong in (
        ModelOptions(target=str(tmp_path), revision="v1"),
        ModelOptions(target="owner/target", drafter=f"ngram+{tmp_path}", drafter_revision="v1"),
        ModelOptions(target="owner/target", drafter="ngram", drafter_revision="v1"),
        ModelOptions(revision="v1"),
    ):
        with pytest.raises(ValueError, match="revision .* on the hub"):
            pair_sources(wrong)


def test_a_chat_template_of_a_file(hub, tmp_path, capsys):
    """It is used, and is part of what a job must not change."""
    template, target = tmp_path / "own.jinja", str(tmp_path / "target")
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}ab")
    text = describe(ModelOptions(target=target), GenerationOptions(chat_template=str(template))).text
    assert text.encode_chat([{"role": "user", "content": "hello"}]) == text.encode("helloab")
    lines, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    job = ["--input", str(lines), "--output", str(output), "--target", target, "--no-speculation", "--block-size", "1"]
    job += ["--max-new-tokens", "4"]
    assert serve.main([*job, "--chat-template", str(template)]) == 0
    assert json.loads(output.read_text())["usage"]["prompt_tokens"] == len("helloab")
    assert serve.main(job) == 2
    assert "chat_template" in capsys.readouterr().err
    assert serve.main([*job, "--chat-template", str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().err


def test_a_chat_template_without_a_tokenizer(tmp_path):
    target = tiny.write_target(tmp_path / "target", tiny.target_config())
    (template := tmp_path / "own.jinja").write_text("a")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        describe(ModelOptions(target=str(target)), GenerationOptions(chat_template=str(template)))
