"use strict";
// Folds and unfolds all lines of a tree. A live page replaces trees, so the document listens, not the buttons.
document.addEventListener("click", event => {
  const button = event.target.closest("button[data-unfold]");
  if (!button) return;
  const isOpen = button.dataset.unfold === "true";
  const [first, ...others] = button.closest(".part").querySelectorAll("details");
  for (const details of others) details.open = isOpen;
  if (first) first.open = true;
});
