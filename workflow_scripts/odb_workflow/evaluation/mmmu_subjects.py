"""The 30 subjects and 6 categories of MMMU (Yue et al., 2024), and the choice among them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from odb_workflow.runtime.errors import UserError

CATEGORIES: dict[str, tuple[str, ...]] = {
    "Art & Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health & Medicine": (
        "Basic_Medical_Science",
        "Clinical_Medicine",
        "Diagnostics_and_Laboratory_Medicine",
        "Pharmacy",
        "Public_Health",
    ),
    "Humanities & Social Science": ("History", "Literature", "Psychology", "Sociology"),
    "Tech & Engineering": (
        "Agriculture",
        "Architecture_and_Engineering",
        "Computer_Science",
        "Electronics",
        "Energy_and_Power",
        "Materials",
        "Mechanical_Engineering",
    ),
}
OTHER_CATEGORY = "Other"
SUBJECTS: tuple[str, ...] = tuple(sorted(name for names in CATEGORIES.values() for name in names))
_CATEGORY_OF = {subject: category for category, names in CATEGORIES.items() for subject in names}


def category_of(subject: str) -> str:
    """The MMMU category of a subject; ``Other`` for a subject that MMMU does not have."""
    return _CATEGORY_OF.get(subject, OTHER_CATEGORY)


def category_order(category: str) -> int:
    """Sort key that keeps the categories in MMMU's order, ``Other`` last."""
    names = list(CATEGORIES)
    return names.index(category) if category in names else len(names)


def parse_subjects(text: str | None) -> list[str] | None:
    """``"Art, Math"`` as a list without doubles; None for ``all``, an empty text or None."""
    names = list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    return None if not names or names == ["all"] else names


def select_subjects(requested: Sequence[str] | None, available: Iterable[str], *, where: str) -> list[str]:
    """The subjects to score, in the order asked for; all available ones, in alphabetical order, when none is
    asked.

    Raises:
        UserError: a requested subject is not available; names the nearest ones.
    """
    known = sorted(set(available))
    if requested is None:
        return known
    missing = [name for name in requested if name not in known]
    if missing:
        lowered = {name.lower(): name for name in known}
        hints = []
        for name in missing:
            near = difflib.get_close_matches(name.lower().replace(" ", "_"), list(lowered), n=3, cutoff=0.4)
            hints.append(
                f"{name!r}" + (f" (nearest: {', '.join(lowered[key] for key in near)})" if near else "")
            )
        raise UserError(
            f"no such subject: {'; '.join(hints)}",
            where=where,
            fix=f"choose from: {', '.join(known)}",
        )
    return list(requested)
