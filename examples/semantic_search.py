"""Embed sentences with all-MiniLM-L6-v2: vectors whose scalar product says how close two sentences are in meaning.

python examples/semantic_search.py --embed sentences.json --out vectors.npy
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # then the path has this file's folder, and not the one in which `examples` is
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import numpy.typing as npt


def read_sentences(path: Path) -> list[str]:
    """Read a JSON list of strings.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is something else.
    """
    try:
        sentences: object = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:  # also bytes that are no text
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(sentences, list):
        raise ValueError(f"it must be a list of strings, not a {type(sentences).__name__}")
    for index, sentence in enumerate(cast("list[object]", sentences)):
        if not isinstance(sentence, str):
            raise ValueError(f"it must be a list of strings, and item {index} is {json.dumps(sentence)[:80]}")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:  # JSON can write half of a pair of surrogates
            raise ValueError(f"item {index} is no valid Unicode: {error.reason}") from error
    return cast("list[str]", sentences)


def embed(sentences: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the vectors of sentences: float32 [sentences, 384], each of length 1, in their order.

    Raises:
        ModuleNotFoundError: The weights are not installed.
    """
    # Not at the top of the file: whoever mistypes a name need not wait for JAX.
    from examples import minilm, plain_embedding

    model = minilm.find_model()
    return plain_embedding.embed_plain(minilm.load_parameters(model), minilm.load_tokenizer(model), sentences)


@contextmanager
def refusing(parser: argparse.ArgumentParser, attempt: str) -> Generator[None]:
    """End the program with one line that says what cannot be done, and why."""
    try:
        yield
    except OSError as error:
        parser.error(f"cannot {attempt}: {error.strerror}")
    except ValueError as error:
        parser.error(f"cannot {attempt}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embed sentences by their meaning.")
    parser.add_argument("--embed", type=Path, required=True, metavar="FILE", help="a JSON list of strings")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the vectors go, as .npy")
    options = parser.parse_args(arguments)
    with refusing(parser, f"embed {options.embed}"):
        sentences = read_sentences(options.embed)
    # At once, and not after all the work; whatever is in the file stays there until then.
    with refusing(parser, f"write {options.out}"), options.out.open("ab"):
        pass
    try:
        vectors = embed(sentences)
    except ModuleNotFoundError as error:
        parser.error(str(error))
    # Given a path, `np.save` would add .npy to one that ends in something else.
    with refusing(parser, f"write {options.out}"), options.out.open("wb") as file:
        np.save(file, vectors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
