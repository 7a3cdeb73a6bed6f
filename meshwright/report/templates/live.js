"use strict";
// Asks the server for a new body every few seconds, and replaces what has changed; filters, sorting and zoom stay.
const LIVE_MS = 3000;

function updatePart(old, fresh) {
  const data = fresh.querySelector("script");
  if (old.matches(".chart, .table") && data) {
    if (old.querySelector("script").textContent === data.textContent) return;
    old.querySelector("script").textContent = data.textContent;
    if (old.matches(".table")) { setUpTable(old); return; }
    delete old.figure;
    delete old.querySelector(".plot").dataset.drawn;
    observer.unobserve(old);
    observer.observe(old);
    return;
  }
  if (old.innerHTML !== fresh.innerHTML) old.innerHTML = fresh.innerHTML;
}

function update(body) {
  const main = document.getElementById("main");
  const fresh = new DOMParser().parseFromString(`<main>${body}</main>`, "text/html").querySelector("main");
  const names = element => [...element.querySelectorAll("section, .part")].map(part => part.id).join(" ");
  if (names(main) !== names(fresh)) {
    main.replaceChildren(...fresh.childNodes);
    setUpTables(main);
    drawCharts();
    return;
  }
  for (const kind of [".subtitle", ".explanation"]) {
    const fresher = fresh.querySelectorAll(kind);
    main.querySelectorAll(kind).forEach((old, index) => { old.innerHTML = fresher[index].innerHTML; });
  }
  for (const part of main.querySelectorAll(".part")) updatePart(part, fresh.querySelector(`#${CSS.escape(part.id)}`));
}

async function poll() {
  try {
    const answer = await fetch("body", {cache: "no-store"});
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    update(await answer.text());
    document.body.classList.remove("offline");
  } catch (error) {
    document.body.classList.add("offline");
    const badge = document.querySelector(".badge");
    if (badge) badge.textContent = "meshwright watch has stopped";
  }
  setTimeout(poll, LIVE_MS);
}
setTimeout(poll, LIVE_MS);
