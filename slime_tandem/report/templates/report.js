"use strict";
(() => {
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

  const show = (nodes, box) => {
    tip.replaceChildren(...nodes);
    tip.hidden = false;
    const t = tip.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const left = Math.min(Math.max(8, box.left + box.width / 2 - t.width / 2), width - t.width - 8);
    const above = box.top - t.height - 8;
    tip.style.left = left + "px";
    tip.style.top = (above >= 8 ? above : box.bottom + 8) + "px";
  };

  // Tokens: one tab stop per response, arrow keys inside it.
  let current = null;
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
    show(nodes, token.getClientRects()[0]);
  };
  const tokenOf = (event) => event.target.closest(".resp .k");
  for (const response of document.querySelectorAll(".resp")) {
    const tokens = [...response.querySelectorAll(".k")];
    let at = 0;
    const go = (i) => {
      at = Math.min(Math.max(0, i), tokens.length - 1);
      if (!tokens.length) return;
      tokens[at].scrollIntoView({ block: "nearest" });
      showToken(tokens[at]);
    };
    response.addEventListener("mouseover", (event) => { if (tokenOf(event)) showToken(tokenOf(event)); });
    response.addEventListener("mouseleave", clear);
    response.addEventListener("click", (event) => { if (tokenOf(event)) go(tokens.indexOf(tokenOf(event))); });
    response.addEventListener("focus", () => { if (response.matches(":focus-visible")) go(at); });
    response.addEventListener("blur", clear);
    response.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    });
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") clear(); });
  document.addEventListener("click", (event) => { if (!tokenOf(event)) clear(); });
  const follow = () => { if (current) showToken(current); else tip.hidden = true; };
  window.addEventListener("scroll", follow, { passive: true, capture: true });

  // Curves: a read-out at the nearest step.
  for (const plot of document.querySelectorAll(".plot")) {
    const series = JSON.parse(plot.dataset.points);
    const svg = plot.querySelector("svg");
    const cross = plot.querySelector(".cross");
    const longest = series.reduce((a, b) => (b.xy.length > a.xy.length ? b : a));
    let at = longest.xy.length - 1;
    const hide = () => {
      cross.setAttribute("visibility", "hidden");
      tip.hidden = true;
    };
    const go = (i) => {
      at = Math.min(Math.max(0, i), longest.xy.length - 1);
      const [step, , x] = longest.xy[at];
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
    plot.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = 0;
      longest.xy.forEach((p, i) => { if (Math.abs(p[2] - x) < Math.abs(longest.xy[best][2] - x)) best = i; });
      go(best);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) go(at); });
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: longest.xy.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    });
  }

  // Filters.
  const root = document.getElementById("transcripts");
  const apply = () => {
    const chosen = (name) => (root.querySelector(`input[name="${name}"]:checked`) || {}).value;
    const answer = chosen("answer");
    root.dataset.shade = chosen("shade") || "author";
    for (const group of root.querySelectorAll(".group")) {
      const wanted = chosen("group");
      group.hidden = wanted !== undefined && group.id !== "g-" + wanted;
      let shown = 0;
      for (const article of group.querySelectorAll("article")) {
        article.hidden = answer !== "all" && article.dataset.right !== answer;
        shown += article.hidden ? 0 : 1;
      }
      group.querySelector(".none").hidden = shown > 0;
    }
  };
  root.addEventListener("change", apply);
  apply();
})();
