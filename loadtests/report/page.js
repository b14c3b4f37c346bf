const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const mark = event.target.closest("[data-tip]");
  tip.style.opacity = mark ? 1 : 0;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${event.clientY + 16}px`;
});
document.documentElement.dataset.ready = "1";
