"use strict";
// Draws every table from its JSON. Cells are text nodes only, so names from a run cannot become HTML.
const ROWS_AT_FIRST = 50;
const ROWS_WITH_FILTER = 12;
const LONG_TEXT = 24;  // characters; longer texts get a column of some width on a phone, too
const NAMES = new Intl.Collator("en", {numeric: true});
const WHOLE = new Intl.NumberFormat("en"), ROUNDED = new Intl.NumberFormat("en", {maximumSignificantDigits: 4});

function cellText(cell) {
  if (cell === null) return "–";
  if (Array.isArray(cell)) return cell[0];
  if (typeof cell !== "number") return String(cell);
  return (Number.isInteger(cell) ? WHOLE : ROUNDED).format(cell);
}

function cellValue(cell) {
  if (Array.isArray(cell)) return cell[1] === null ? cell[0] : cell[1];
  return cell;
}

function compareCells(a, b) {
  const left = cellValue(a), right = cellValue(b);
  if (left === null || right === null) return (left === null) - (right === null);
  if (typeof left === "number" && typeof right === "number") return left - right;
  return NAMES.compare(String(left), String(right));
}

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// The right edge of a table or drawing that goes on beyond it is faded.
function showWhetherMore(scroll) {
  scroll.classList.toggle("goes-on", scroll.scrollLeft + scroll.clientWidth < scroll.scrollWidth - 2);
}
const widths = new ResizeObserver(entries => { for (const entry of entries) showWhetherMore(entry.target); });
document.addEventListener("scroll", event => {
  if (event.target.matches?.(".table-scroll, .drawing-scroll")) showWhetherMore(event.target);
}, {capture: true, passive: true});

function setUpTable(part) {
  const data = JSON.parse(part.querySelector("script").textContent);
  const before = part.tableState || {};
  const state = {data, filter: before.filter || "", column: before.column, descending: before.descending, all: before.all};
  part.tableState = state;
  state.texts = data.rows.map(row => row.map(cellText).join(" ").toLowerCase());
  const numeric = data.header.map((_, column) => data.rows.some(row => typeof cellValue(row[column]) === "number") &&
    data.rows.every(row => row[column] === null || typeof cellValue(row[column]) === "number" || row[column] === "–"));
  const tools = part.querySelector(".table-tools");
  const scroll = part.querySelector(".table-scroll");

  if (!tools.firstChild && data.rows.length > ROWS_WITH_FILTER) {
    const input = element("input");
    input.type = "search";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", "Filter rows");
    input.addEventListener("input", () => { part.tableState.filter = input.value; part.drawTable(); });
    const more = element("button", "more");
    more.type = "button";
    more.addEventListener("click", () => { part.tableState.all = true; part.drawTable(); });
    tools.append(input, element("span", "count"), more);
  }

  part.drawTable = () => {
    const wanted = state.filter.trim().toLowerCase();
    let rows = data.rows.map((row, index) => [row, index]).filter(([, index]) => state.texts[index].includes(wanted));
    if (state.column !== undefined) {
      rows.sort(([a], [b]) => compareCells(a[state.column], b[state.column]) * (state.descending ? -1 : 1));
    }
    const count = rows.length;
    if (!state.all) rows = rows.slice(0, ROWS_AT_FIRST);
    const table = element("table"), head = element("thead"), body = element("tbody"), headRow = element("tr");
    data.header.forEach((title, column) => {
      const isSorted = state.column === column;
      const cell = element("th", numeric[column] ? "number" : "");
      cell.scope = "col";
      if (isSorted) cell.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      const button = element("button", "", title + (isSorted ? (state.descending ? " ↓" : " ↑") : ""));
      button.type = "button";
      button.addEventListener("click", () => {
        part.tableState.descending = isSorted ? !state.descending : false;
        part.tableState.column = column;
        part.drawTable();
      });
      cell.append(button);
      headRow.append(cell);
    });
    head.append(headRow);
    for (const [row] of rows) {
      const line = element("tr");
      row.forEach((cell, column) => {
        const tone = Array.isArray(cell) ? cell[2] : "";
        const text = cellText(cell), kind = numeric[column] ? "number" : text.length > LONG_TEXT ? "long" : "";
        line.append(element("td", [kind, tone].join(" ").trim(), text));
      });
      body.append(line);
    }
    table.append(head, body);
    scroll.replaceChildren(table);
    showWhetherMore(scroll);
    if (tools.firstChild) {
      tools.querySelector(".count").textContent = `${WHOLE.format(rows.length)} of ${WHOLE.format(data.rows.length)} rows`;
      const more = tools.querySelector(".more");
      more.hidden = rows.length === count;
      more.textContent = `Show all ${WHOLE.format(count)}`;
    }
  };
  part.drawTable();
}

function setUpTables(root) {
  for (const part of root.querySelectorAll(".part.table")) setUpTable(part);
  for (const scroll of root.querySelectorAll(".table-scroll, .drawing-scroll")) widths.observe(scroll);
}
setUpTables(document);
