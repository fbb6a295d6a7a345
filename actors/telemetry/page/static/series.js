// Draws the time series of a view with uPlot, in the colours of the style sheet.
"use strict";
(() => {
  const HEIGHT = 200;
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];
  const drawn = new Map();
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));

  // Times are in UTC, as everywhere on the page.
  function times(u, ticks) {
    const span = u.scales.x.max - u.scales.x.min;
    const [from, to] = span > 2 * 86400 ? [5, 10] : span > 900 ? [11, 16] : [11, 19];
    return ticks.map((tick) => new Date(tick * 1000).toISOString().slice(from, to));
  }

  function options(data, width) {
    const colours = style("--series").split(/\s+/);
    const axis = { stroke: style("--soft"), font: "12px system-ui, sans-serif", grid: { stroke: style("--rule"), width: 1 }, ticks: { show: false } };
    return {
      width, height: HEIGHT,
      scales: { x: { time: data.time } },
      cursor: { y: false, points: { size: 6 } },
      legend: { live: true },
      axes: [
        { ...axis, grid: { show: false }, size: 28, ...(data.time ? { values: times, space: 80 } : { incrs: WHOLE }) },
        { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => number(tick) + (data.unit ? " " + data.unit : "")) },
      ],
      series: [
        { label: data.x_label, value: (u, value) => {
          const at = value ?? u.data[0][u.data[0].length - 1];
          return data.time ? new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ") : String(at);
        } },
        ...data.series.map((one, place) => ({
          label: one.label,
          stroke: colours[place % colours.length],
          width: 1.5,
          spanGaps: true,
          points: one.points ? { show: true, size: 6, fill: colours[place % colours.length] } : { show: data.x.length < 3, size: 5 },
          value: (u, value, series, place) => number(place == null ? u.data[series].findLast((each) => each != null) : value),
        })),
      ],
    };
  }

  function draw(figure, data) {
    const plot = figure.querySelector(".plot");
    drawn.get(figure)?.chart.destroy();
    if (!data.x.length) {
      drawn.delete(figure);
      plot.textContent = "No data yet.";
      return;
    }
    plot.textContent = "";
    const rows = [data.x, ...data.series.map((one) => one.y)];
    drawn.set(figure, { chart: new uPlot(options(data, plot.clientWidth), rows, plot), data });
  }

  async function load(figure) {
    try {
      const answer = await fetch(figure.dataset.series);
      if (answer.ok) draw(figure, await answer.json());
    } catch { /* The next change loads it again. */ }
  }

  const all = () => document.querySelectorAll(".chart").forEach(load);
  document.addEventListener("updated", all);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(({ data }, figure) => draw(figure, data)));
  new ResizeObserver(() => drawn.forEach(({ chart }, figure) => chart.setSize({ width: figure.querySelector(".plot").clientWidth, height: HEIGHT }))).observe(document.getElementById("main"));
  all();
})();
