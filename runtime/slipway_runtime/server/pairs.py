"""The prompts of rerankers: a query and a document in one text."""

from typing import Final

ROLES: Final = ("'query'", "'document'"), ('"query"', '"document"')
_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"


def names_roles(template: str) -> bool:
    """Whether a chat template compares roles with query and document."""
    return any(all(role in template for role in quoted) for quoted in ROLES)


def judged(query: str, document: str) -> str:
    """The prompt that Qwen3-Reranker was trained with: it ends where the answer, yes or no, begins."""
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {_INSTRUCT}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
