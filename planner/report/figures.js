const drawn = [];
function colours() {
  const style = getComputedStyle(document.documentElement);
  const fg = style.getPropertyValue("--fg").trim(), line = style.getPropertyValue("--line").trim();
  return {"font.color": fg, "xaxis.gridcolor": line, "yaxis.gridcolor": line, "xaxis.linecolor": line,
    "yaxis.linecolor": line, "xaxis.zerolinecolor": line, "yaxis.zerolinecolor": line};
}
function numbered(figure) {
  // Plans by their number alone: their degrees stand in the ranking.
  const names = figure.data.flatMap((one) => one.y || []).filter((name) => /^\w+: /.test(name));
  if (innerWidth > 600 || !names.length) return;
  figure.layout.yaxis = {...figure.layout.yaxis, tickmode: "array", tickvals: names,
    ticktext: names.map((name) => name.split(":")[0])};
}
function narrowed(figure) {
  // Small names above the figure, which grows by their rows, else a legend scrolls: in two columns where the
  // longest one leaves room for another.
  const layout = figure.layout, shown = figure.data.filter((one) => one.name && one.showlegend !== false);
  if (innerWidth > 600 || layout.showlegend === false || !shown.length) return;
  const names = [...new Set(shown.map((one) => one.legendgroup || one.name))];
  const columns = Math.max(...names.map((name) => name.length)) > 24 ? 1 : 2;
  const rows = 15 * Math.ceil(names.length / columns);
  layout.legend = {...layout.legend, font: {size: 10}, entrywidthmode: "fraction", entrywidth: .96 / columns};
  layout.margin = {...layout.margin, t: rows + 20};
  layout.height += rows;
}
function draw(name, figure) {
  numbered(figure);
  narrowed(figure);
  Plotly.newPlot(name, figure.data, figure.layout, {responsive: true, displaylogo: false}).then(() => {
    drawn.push(name);
    Plotly.relayout(name, colours());
    document.documentElement.dataset.drawn = drawn.length;
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const name of drawn) Plotly.relayout(name, colours());
});
