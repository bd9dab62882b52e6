"use strict";
const EVERY_MS = 2000, status_ = document.getElementById("status"), table = document.getElementById("table");
let last = {}, seen = 0;

function update(name, text) {
  if (last[name] === text) return;
  last[name] = text;
  const figure = JSON.parse(text);
  // What was zoomed stays so.
  figure.layout.uirevision = "run";
  if (!drawn.includes(name)) return draw(name, figure);
  narrowed(figure);
  Plotly.react(name, figure.data, figure.layout).then(() => Plotly.relayout(name, colours()));
}
async function look() {
  try {
    const answer = await (await fetch("runs")).json();
    if (table.innerHTML !== answer.table) table.innerHTML = answer.table;
    for (const place of document.querySelectorAll(".figure")) {
      place.closest("section").hidden = !(place.id in answer.figures);
    }
    for (const [name, figure] of Object.entries(answer.figures)) update(name, figure);
    status_.textContent = `as of ${new Date().toLocaleTimeString()}`;
  } catch {
    status_.textContent = "the server does not answer; is `planner watch` still running?";
  }
  document.documentElement.dataset.seen = ++seen;
  setTimeout(look, EVERY_MS);
}
look();
