"use strict";
(() => {
  // Listeners sit on the document: the live page changes its parts under them.
  const tip = document.getElementById("tip");
  const el = (name, text, css) => {
    const node = document.createElement(name);
    node.textContent = text;
    if (css) node.className = css;
    return node;
  };
  const signed = (x) => (x < 0 ? "\u2212" : "+") + Math.abs(x).toFixed(2);
  const plain = (x) => (x < 0 ? "\u2212" : "") + Math.abs(x).toFixed(2);
  const number = (x) => String(Number(x.toPrecision(4)));
  const inside = (event, css) => (event.target instanceof Element ? event.target.closest(css) : null);
  const left = (event, node) => node && !(event.relatedTarget instanceof Node && node.contains(event.relatedTarget));

  const show = (nodes, box) => {
    tip.replaceChildren(...nodes);
    tip.hidden = false;
    const t = tip.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const x = Math.min(Math.max(8, box.left + box.width / 2 - t.width / 2), width - t.width - 8);
    const above = box.top - t.height - 8;
    tip.style.left = x + "px";
    tip.style.top = (above >= 8 ? above : box.bottom + 8) + "px";
  };

  // Tokens: one tab stop per response, arrow keys inside it.
  let current = null;
  const places = new WeakMap();
  const clear = () => {
    if (current) current.classList.remove("on");
    current = null;
    tip.hidden = true;
  };
  const showToken = (token) => {
    if (current !== token) clear();
    current = token;
    token.classList.add("on");
    const senior = token.classList.contains("s");
    const own = Number(token.dataset.l);
    const list = document.createElement("dl");
    const line = (name, value, chance) => list.append(el("dt", name), el("dd", value), el("dd", chance, "p"));
    const chance = (x) => "p " + Math.exp(x).toPrecision(2);
    line(senior ? "senior" : "junior", plain(own) + " nats", chance(own));
    const nodes = [el("b", "\u201c" + token.textContent + "\u201d"), list];
    if (token.dataset.t === undefined) {
      nodes.push(el("p", token.closest(".resp").dataset.why));
    } else {
      const teacher = Number(token.dataset.t);
      const d = own - teacher;
      line("teacher", plain(teacher) + " nats", chance(teacher));
      line("difference", signed(d) + " nats", "");
      const push = d > 0 ? "the teacher pushes this token down" : "the teacher pushes this token up";
      nodes.push(el("p", !senior ? "written by the junior: not distilled" : Math.abs(d) < 0.1 ? "both agree" : push));
    }
    show(nodes, token.getClientRects()[0] || token.getBoundingClientRect());
  };
  const goToken = (response, i) => {
    const tokens = response.querySelectorAll(".k");
    if (!tokens.length) return;
    const at = Math.min(Math.max(0, i), tokens.length - 1);
    places.set(response, at);
    tokens[at].scrollIntoView({ block: "nearest" });
    showToken(tokens[at]);
  };
  const follow = () => {
    if (current && current.isConnected) showToken(current);
    else clear();
  };

  // Curves: a read-out at the nearest step.
  const parsed = new WeakMap();
  const seriesOf = (plot) => {
    const text = plot.dataset.points;
    let known = parsed.get(plot);
    if (!known || known.text !== text) {
      const series = JSON.parse(text);
      known = { text, series, longest: series.reduce((a, b) => (b.xy.length > a.xy.length ? b : a)) };
      parsed.set(plot, known);
    }
    return known;
  };
  const hidePlot = (plot) => {
    plot.querySelector(".cross").setAttribute("visibility", "hidden");
    tip.hidden = true;
  };
  const goPlot = (plot, i) => {
    const { series, longest } = seriesOf(plot);
    const at = Math.min(Math.max(0, i), longest.xy.length - 1);
    places.set(plot, at);
    const [step, , x] = longest.xy[at];
    const svg = plot.querySelector("svg");
    const cross = plot.querySelector(".cross");
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.setAttribute("visibility", "visible");
    const list = document.createElement("dl");
    for (const s of series) {
      const point = s.xy.find((p) => p[0] === step);
      list.append(el("dt", s.label), el("dd", point ? number(point[1]) : "\u2013"), el("dd", ""));
    }
    const box = svg.getBoundingClientRect();
    const px = box.left + (x / svg.viewBox.baseVal.width) * box.width;
    show([el("b", "step " + step), list], { left: px, width: 0, top: box.top, bottom: box.bottom });
  };
  const placeOf = (node, otherwise) => places.get(node) ?? otherwise;

  document.addEventListener("mouseover", (event) => {
    const token = inside(event, ".resp .k");
    if (token) showToken(token);
  });
  document.addEventListener("mouseout", (event) => {
    if (left(event, inside(event, ".resp"))) clear();
  });
  document.addEventListener("pointermove", (event) => {
    const plot = inside(event, ".plot");
    if (!plot) return;
    const svg = plot.querySelector("svg");
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const { longest } = seriesOf(plot);
    let best = 0;
    longest.xy.forEach((p, i) => { if (Math.abs(p[2] - x) < Math.abs(longest.xy[best][2] - x)) best = i; });
    goPlot(plot, best);
  });
  document.addEventListener("pointerout", (event) => {
    const plot = inside(event, ".plot");
    if (left(event, plot)) hidePlot(plot);
  });
  document.addEventListener("click", (event) => {
    const token = inside(event, ".resp .k");
    if (!token) return clear();
    const response = token.closest(".resp");
    goToken(response, [...response.querySelectorAll(".k")].indexOf(token));
  });
  document.addEventListener("focusin", (event) => {
    const node = inside(event, ".resp, .plot");
    if (!node || node !== event.target || !node.matches(":focus-visible")) return;
    if (node.matches(".resp")) goToken(node, placeOf(node, 0));
    else goPlot(node, placeOf(node, Infinity));
  });
  document.addEventListener("focusout", (event) => {
    const node = inside(event, ".resp, .plot");
    if (!node) return;
    if (node.matches(".resp")) clear();
    else hidePlot(node);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return clear();
    const node = inside(event, ".resp, .plot");
    if (!node) return;
    const response = node.matches(".resp");
    const count = response ? node.querySelectorAll(".k").length : seriesOf(node).longest.xy.length;
    const at = placeOf(node, response ? 0 : count - 1);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (response) goToken(node, to);
    else goPlot(node, to);
  });
  window.addEventListener("scroll", follow, { passive: true, capture: true });

  // Filters.
  const apply = () => {
    const root = document.getElementById("transcripts");
    if (!root) return;
    const chosen = (name) => (root.querySelector(`input[name="${name}"]:checked`) || {}).value;
    const answer = chosen("answer");
    root.dataset.shade = chosen("shade") || "author";
    for (const group of root.querySelectorAll(".group")) {
      const wanted = chosen("group");
      group.hidden = wanted !== undefined && group.id !== "g-" + wanted;
      let shown = 0;
      for (const article of group.querySelectorAll("article")) {
        article.hidden = answer !== "all" && answer !== undefined && article.dataset.right !== answer;
        shown += article.hidden ? 0 : 1;
      }
      group.querySelector(".none").hidden = shown > 0;
    }
  };
  document.addEventListener("change", apply);
  document.addEventListener("parts", () => {
    apply();
    if (current) follow();
  });
  apply();
})();
