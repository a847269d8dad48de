// Runs before the first paint, so that a dark page never flashes white.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const apply = () => {
  document.documentElement.dataset.bsTheme = dark.matches ? "dark" : "light";
};
apply();
dark.addEventListener("change", apply);
