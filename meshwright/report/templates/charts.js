"use strict";
// Inflates plotly and draws the charts: those in view first, the others while the browser has nothing to do.
const COLOUR = /^var\((--[a-z0-9-]+)\)$/;
const root = document.documentElement;
let plotly = null;
let printing = false;

function themeColour(text) {
  const match = COLOUR.exec(text);
  return match ? getComputedStyle(root).getPropertyValue(match[1]).trim() : text;
}

function withThemeColours(value, isColour) {
  if (typeof value === "string") return isColour ? themeColour(value) : value;
  if (Array.isArray(value)) return value.map(item => withThemeColours(item, isColour));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) =>
      [key, withThemeColours(item, isColour || /color/i.test(key))]));
  }
  return value;
}

function isNarrow(plot) { return plot.clientWidth < 560; }

// On a narrow screen, the entries of a legend are below each other: the chart is higher by as much.
function heightOf(figure, plot) {
  const entries = (figure.data || []).filter(trace => trace.showlegend !== false).length;
  const hasLegend = (figure.layout || {}).showlegend ?? entries > 1;
  return Number(plot.parentElement.dataset.height) + (isNarrow(plot) && hasLegend ? 16 * Math.max(0, entries - 2) : 0);
}

function layoutOf(figure, plot) {
  const ink = themeColour("var(--ink)"), muted = themeColour("var(--muted)"), grid = themeColour("var(--grid)");
  const axis = {gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickcolor: grid, automargin: true, ticklabeloverflow: "allow",
    tickfont: {color: muted}, title: {standoff: 8}};
  const layout = withThemeColours(figure.layout || {}, false);
  const result = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: (figure.data || []).length > 1,
    font: {color: ink, size: 12, family: getComputedStyle(document.body).fontFamily},
    margin: {l: 56, r: 16, t: 12, b: 44}, hovermode: "closest",
    colorway: [0, 1, 2, 3, 4, 5, 6, 7].map(number => themeColour(`var(--series-${number})`)),
    hoverlabel: {bgcolor: themeColour("var(--surface)"), bordercolor: grid, font: {color: ink}, align: "left", namelength: -1},
    legend: {orientation: "h", traceorder: "normal", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: {color: ink}},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink, orientation: "v"},
    ...layout,
    autosize: true, height: heightOf(figure, plot),
  };
  for (const key of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter(name => /^[xy]axis\d*$/.test(name))])) {
    const given = layout[key] || {};
    const title = typeof given.title === "string" ? {text: given.title} : given.title || {};
    result[key] = {...axis, ...given, title: {...axis.title, ...title}, tickfont: {...axis.tickfont, ...given.tickfont}};
    if (isNarrow(plot) && key.startsWith("x")) result[key].nticks = given.nticks || 5;
  }
  if (isNarrow(plot)) result.margin = {...result.margin, l: 44, r: 8};
  return result;
}

function drawChart(part) {
  const plot = part.querySelector(".plot");
  if (!plotly || plot.dataset.drawn === root.dataset.theme + printing) return;
  const figure = part.figure || (part.figure = JSON.parse(part.querySelector("script").textContent));
  plot.style.height = `${heightOf(figure, plot)}px`;
  plotly.react(plot, withThemeColours(figure.data || [], false), layoutOf(figure, plot),
    {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
  plot.dataset.drawn = root.dataset.theme + printing;
}

const whenIdle = window.requestIdleCallback || (task => setTimeout(task, 20));
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) drawChart(entry.target);
}, {rootMargin: "300px"});

function allCharts() { return [...document.querySelectorAll(".part.chart")]; }

function drawWhenIdle() {
  const next = allCharts().find(part => part.querySelector(".plot").dataset.drawn !== root.dataset.theme + printing);
  if (!next) { root.dataset.charts = "drawn"; return; }
  drawChart(next);
  whenIdle(drawWhenIdle);
}

function drawCharts() {
  if (!plotly) return;
  delete root.dataset.charts;
  for (const part of allCharts()) { observer.unobserve(part); observer.observe(part); }
  whenIdle(drawWhenIdle);
}

async function inflatePlotly() {
  const holder = document.getElementById("plotly");
  if (!holder) { root.dataset.charts = "drawn"; return; }
  const letters = atob(holder.textContent), bytes = new Uint8Array(letters.length);
  for (let index = 0; index < letters.length; index++) bytes[index] = letters.charCodeAt(index);
  holder.remove();
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  // A script with an address is compiled on another thread, one without is not.
  script.src = URL.createObjectURL(new Blob([await new Response(inflated).arrayBuffer()], {type: "text/javascript"}));
  await new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = () => reject(new Error("its script was not loaded"));
    document.head.append(script);
  });
  URL.revokeObjectURL(script.src);
  script.remove();
  plotly = window.Plotly;
  drawCharts();
}

const preferred = window.matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
function setTheme() {
  const theme = printing ? "light" : chosenTheme || (preferred.matches ? "dark" : "light");
  root.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
}
preferred.addEventListener("change", () => { setTheme(); drawCharts(); });
document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = root.dataset.theme === "dark" ? "light" : "dark";
  setTheme();
  drawCharts();
});
// Printed pages are light, and every chart is on them.
function setPrinting(value) {
  if (printing === value) return;
  printing = value;
  setTheme();
  allCharts().forEach(drawChart);
}
window.addEventListener("beforeprint", () => setPrinting(true));
window.addEventListener("afterprint", () => setPrinting(false));
setTheme();
inflatePlotly().catch(error => {
  const notice = document.createElement("p");
  notice.className = "notice";
  notice.textContent = `The charts cannot be drawn: this browser could not load the chart library (${error.message}).`;
  document.getElementById("main").prepend(notice);
});
