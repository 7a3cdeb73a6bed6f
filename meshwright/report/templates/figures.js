"use strict";
// Draws every chart as PNG and SVG on white ground, and sends it to the server that this page came from.
const FIGURE_WIDTH = 900;

async function sendFigures() {
  while (root.dataset.charts !== "drawn") await new Promise(resolve => setTimeout(resolve, 50));
  chosenTheme = "light";
  setTheme();
  for (const part of allCharts()) {
    const plot = part.querySelector(".plot");
    const figure = part.figure || JSON.parse(part.querySelector("script").textContent);
    const layout = {...layoutOf(figure, plot), autosize: false, width: FIGURE_WIDTH, paper_bgcolor: "#ffffff"};
    const drawing = {data: withThemeColours(figure.data || [], false), layout};
    for (const format of ["png", "svg"]) {
      const options = {format, width: FIGURE_WIDTH, height: layout.height, scale: format === "png" ? 3 : 1};
      await fetch(`${part.id}.${format}`, {method: "POST", body: await plotly.toImage(drawing, options)});
    }
  }
}
sendFigures().finally(() => fetch("finished", {method: "POST", body: ""}));
