// Follows the run: when its files change, the content of this view is read again and replaced, at most once in two
// seconds, never while something in it has the focus or is selected, and not while updates are paused.
"use strict";
(() => {
  const LEAST_MS = 2000, AGAIN_MS = 10000;
  const holder = document.getElementById("updates");
  const button = holder.querySelector("button");
  const said = holder.querySelector("[data-updated]");
  let paused = false, changed = false, busy = false, last = Date.now();

  function inUse(main) {
    const active = document.activeElement;
    const selected = window.getSelection();
    return (active !== main && main.contains(active)) || (selected && !selected.isCollapsed && main.contains(selected.anchorNode));
  }

  async function update() {
    const main = document.getElementById("main");
    if (!changed || busy || paused || document.hidden || inUse(main) || Date.now() - last < LEAST_MS) return;
    busy = true;
    changed = false;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (answer.status === 401) return location.reload();
      const read = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = read.getElementById("main");
      if (!fresh || inUse(main)) { changed = true; return; }
      // Charts keep their drawing, and read their data again.
      const charts = main.querySelector(".charts"), place = fresh.querySelector(".charts");
      if (charts && place) place.replaceWith(charts);
      const left = [...main.querySelectorAll(".scroll")].map((region) => region.scrollLeft);
      main.replaceChildren(...fresh.childNodes);
      main.querySelectorAll(".scroll").forEach((region, number) => { region.scrollLeft = left[number] || 0; });
      document.querySelector(".state").replaceWith(read.querySelector(".state"));
      said.textContent = "Updated " + new Date().toISOString().slice(11, 19) + " UTC";
      document.dispatchEvent(new Event("updated"));
    } catch {
      changed = true;
    } finally {
      busy = false;
      last = Date.now();
    }
  }

  function follow() {
    const events = new EventSource(document.body.dataset.events);
    events.addEventListener("changed", () => { changed = true; update(); });
    // A browser comes again by itself after a cut, and not after a refusal, as when too many pages follow the run.
    events.addEventListener("error", () => {
      if (events.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MS);
    });
    events.addEventListener("end", () => { events.close(); setTimeout(follow, AGAIN_MS); });
  }

  follow();
  // What is being computed is there a little later, without any change of the files.
  setInterval(() => { changed ||= document.querySelector("[data-pending]") !== null; update(); }, LEAST_MS);
  holder.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    update();
  });
})();
