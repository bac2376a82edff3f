"""Questions to the documents: full-text search in memory, passages with links, no model."""

import re

from db import sqlite3

WORDS = 24  # of a question are looked at
PASSAGES = 5
# Too common to tell one passage from another.
COMMON = frozenset("a an and are as at be by can do does for from how i if in is it me my of on or that the this to "
                   "was what when where which who why will with you your".split())  # fmt: skip
HOW_TO = "Ask with ?q= and a few words, such as /ask?q=what+does+a+dispute+cost. Send Accept: text/markdown for plain text."
FOUND = "Passages of the documents, best first; follow url for the rest."
NOTHING = "Nothing fits these words. Try fewer or other ones, or read /agents.md (everything in one page) or /docs."


def index(pages):
    """Build the index of all pages; a connection that threads may share, because it is only read from now on."""
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.execute("CREATE VIRTUAL TABLE passages USING fts5 (title, section, text, path UNINDEXED, tokenize = 'porter unicode61')")
    db.executemany(
        "INSERT INTO passages (title, section, text, path) VALUES (?, ?, ?, ?)",
        [
            (page.title, heading, text, f"{page.path}#{anchor}" if heading != page.title else page.path)
            for page in pages.values()
            for heading, anchor, text in page.sections
        ],
    )
    return db


def ask(db, question, base_url):
    """Return the answer to a question, whatever characters it has; without words it says how to ask."""
    words = [word for word in re.findall(r"\w+", question.lower()) if word.isascii() or word.isalnum()][:WORDS]
    words = [word for word in words if word not in COMMON] or words
    if not words:
        return {"query": question, "results": [], "hint": HOW_TO}
    # Quoted, so that no word is an operator; a prefix, so that "refunds" also finds a longer word.
    terms = " OR ".join(f'"{word}"' + ("*" if len(word) > 3 else "") for word in dict.fromkeys(words))
    rows = db.execute(
        "SELECT title, section, path, snippet(passages, 2, '', '', ' … ', 60) AS text FROM passages"
        " WHERE passages MATCH ? ORDER BY bm25(passages, 4.0, 6.0, 1.0), path LIMIT ?",
        (terms, PASSAGES),
    ).fetchall()
    results = [
        {"title": title, "section": section, "url": base_url + path, "text": text} for title, section, path, text in rows
    ]
    return {"query": question, "results": results, "hint": FOUND if results else NOTHING}


def as_markdown(answer):
    """Write an answer as Markdown, for a reader that prefers it. The question is not in it: it is a stranger's text."""
    parts = ["# Answers", answer["hint"]]
    for found in answer["results"]:
        title = found["title"] if found["section"] == found["title"] else f"{found['title']}: {found['section']}"
        parts.append(f"## [{title}]({found['url']})\n\n{found['text']}")
    return "\n\n".join(parts) + "\n"
