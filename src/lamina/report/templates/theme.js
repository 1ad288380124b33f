try {
  const chosen = localStorage.getItem("lamina-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // a browser that keeps nothing for files follows the system
}
