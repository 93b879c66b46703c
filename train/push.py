"""The stage `push`: an exported drafter to the Hugging Face hub."""

from pathlib import Path

from dflash_jax.drafters.loading import read_drafter_config
from dflash_jax.files import reading
from dflash_jax.train.arguments import PushOptions


def main(options: PushOptions) -> int:
    """Runs the stage; returns its exit status.

    Raises:
        ValueError: no exported drafter, no repository of that name, or the hub refuses it.
    """
    directory = Path(options.drafter)
    if not directory.is_dir():
        raise ValueError(f"--drafter must be a directory that export has written, got {options.drafter}")
    with reading(directory / "config.json"):
        read_drafter_config(directory)
    if options.repo.count("/") != 1:
        raise ValueError(f"--repo must be OWNER/NAME, got {options.repo!r:.80}")
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        api.create_repo(options.repo, private=options.private, exist_ok=True)
        done = api.upload_folder(
            repo_id=options.repo,
            folder_path=directory,
            allow_patterns=["*.json", "*.safetensors", "README.md"],
            commit_message="A drafter, by dflash_jax",
        )
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"{options.repo} could not be uploaded: {reason}; is there a token? (hf auth login)"
        ) from error
    print(f"uploaded to {done.commit_url}")
    return 0
