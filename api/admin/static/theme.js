// Runs before anything is painted, so that a page of the other colour scheme does not flash up.
// "system" is not written down: the style sheet then goes by prefers-color-scheme.
{
  const chosen = localStorage.getItem("kvpager-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
