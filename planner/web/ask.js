"use strict";
const form = document.getElementById("question"), found = document.getElementById("found");
const status_ = document.getElementById("status"), root = document.documentElement;
const first = JSON.parse(form.dataset.first);
let asked = 0, waits = null, files = {};

function question() {
  const values = {};
  for (const [name, value] of new FormData(form)) if (value.trim() !== "") values[name] = value.trim();
  return values;
}
function show(values) {
  // Set the fields to the values, all others to nothing.
  for (const control of form.elements) {
    if (!control.name) continue;
    const value = values[control.name] ?? "";
    if (control.type === "checkbox") control.checked = value === "true";
    else if (control.tagName === "SELECT" && value && ![...control.options].some((one) => one.value === value)) {
      control.add(new Option(value, value));
      control.value = value;
    } else control.value = value;
    if (value && control.closest("details")) control.closest("details").open = true;
  }
}
function addressed() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}
function address(values) {
  return "#" + new URLSearchParams(values);
}
function message(text) {
  const line = document.createElement("p");
  line.className = "error";
  line.setAttribute("role", "alert");
  line.textContent = text;
  for (const name of drawn.splice(0)) Plotly.purge(name);
  found.replaceChildren(line);
  status_.textContent = "";
}
async function ask() {
  const values = question(), number = ++asked, started = performance.now();
  if (waits) waits.abort();
  waits = new AbortController();
  if (address(values) !== location.hash) history.replaceState(null, "", address(values));
  status_.textContent = "planning…";
  found.setAttribute("aria-busy", "true");
  let answer;
  try {
    const sent = await fetch("answer", {method: "POST", body: JSON.stringify(values), signal: waits.signal,
      headers: {"Content-Type": "application/json"}});
    answer = await sent.json();
  } catch (error) {
    if (error.name === "AbortError") return;
    answer = {error: "the server does not answer; is `planner web` still running?"};
  }
  if (number !== asked) return;
  found.removeAttribute("aria-busy");
  files = {...answer.files};
  if (answer.config_file) files[answer.config_file] = values.config;
  if (answer.error) message(answer.error);
  else {
    for (const name of drawn.splice(0)) Plotly.purge(name);
    root.dataset.drawn = 0;
    found.innerHTML = answer.html;
    for (const [name, figure] of Object.entries(answer.figures)) draw(name, JSON.parse(figure));
    status_.textContent = `answered in ${((performance.now() - started) / 1000).toFixed(2)} s`;
  }
  document.title = (found.querySelector("h1") || {textContent: "LLM parallelism planner"}).textContent;
  root.dataset.answered = number;
}
let later = 0;
form.addEventListener("input", (event) => {
  // The name of a model of the catalogue is not that of a config.json which is pasted after it.
  const name = form.elements.model, known = [...document.getElementById("values-model").options];
  if (event.target.name === "config" && known.some((one) => one.value === name.value.trim())) name.value = "";
  clearTimeout(later);
  later = setTimeout(ask, 400);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(later);
  ask();
  // On a narrow screen the answer lies below the form.
  const answer = document.getElementById("answer");
  if (answer.getBoundingClientRect().top > innerHeight / 2) answer.scrollIntoView();
});
document.getElementById("clear").addEventListener("click", () => { show(first); ask(); });
document.getElementById("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(location.href);
    status_.textContent = "the link is copied";
  } catch {
    status_.textContent = "the browser does not let the link be copied; it stands in the address bar";
  }
});
found.addEventListener("click", (event) => {
  const change = event.target.closest("[data-fields]"), file = event.target.closest("[data-file]");
  if (change) {
    show({...question(), ...JSON.parse(change.dataset.fields)});
    ask();
  }
  if (file) {
    const url = URL.createObjectURL(new Blob([files[file.dataset.file]], {type: "text/plain"}));
    file.href = url;
    setTimeout(() => { file.href = "#"; URL.revokeObjectURL(url); }, 1000);
  }
});
addEventListener("hashchange", () => { show(addressed()); ask(); });
show(location.hash.length > 1 ? addressed() : first);
ask();
