//! What a demo says while it runs, on stderr: numbered steps, what one should see, and figures that move. Colours
//! come with a terminal only, and not with NO_COLOR.

use std::time::Duration;

use anstyle::Style;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

const STRONG: Style = Style::new().bold();
const QUIET: Style = Style::new().dimmed();
/// How often figures that move are written down where they cannot be drawn in place.
const LINE_EVERY: Duration = Duration::from_secs(1);
const GAUGE_CELLS: usize = 30;

pub fn title(title: &str, about: &str) {
    anstream::eprintln!("{STRONG}{title}{STRONG:#}");
    note(about);
}

/// A step that begins. `look_for` is what one should see.
pub fn step(number: usize, what: &str, look_for: &str) {
    anstream::eprintln!("\n{STRONG}{number}. {what}{STRONG:#}");
    if !look_for.is_empty() {
        anstream::eprintln!("   {QUIET}You should see: {look_for}{QUIET:#}");
    }
}

pub fn note(text: &str) {
    for line in text.lines() {
        anstream::eprintln!("   {line}");
    }
}

/// Sets what follows apart.
pub fn gap() {
    anstream::eprintln!();
}

/// `37 ███████████···` of how many there are.
pub fn gauge(value: i64, of: i64) -> String {
    let share = value.clamp(0, of.max(1)) as f64 / of.max(1) as f64;
    let full = (share * GAUGE_CELLS as f64).round() as usize;
    format!("{value:>5} {}{}", "█".repeat(full), "·".repeat(GAUGE_CELLS - full))
}

/// Figures that move: redrawn in place on a terminal, written down once a second elsewhere; the last ones stay.
pub struct Live {
    bar: ProgressBar,
    written: Option<(Instant, String)>,
    last: String,
}

impl Live {
    pub fn start() -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("   {msg}") {
            bar.set_style(style);
        }
        Self { bar, written: None, last: String::new() }
    }

    pub fn show(&mut self, figures: String) {
        if !self.bar.is_hidden() {
            self.bar.set_message(figures.clone());
        } else if self.written.as_ref().is_none_or(|(at, _)| at.elapsed() >= LINE_EVERY) {
            note(&figures);
            self.written = Some((Instant::now(), figures.clone()));
        }
        self.last = figures;
    }

    pub fn end(self) {
        self.bar.finish_and_clear();
        if self.written.is_none_or(|(_, figures)| figures != self.last) {
            note(&self.last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_is_as_full_as_its_value() {
        let cells = |value, of| gauge(value, of).chars().filter(|cell| *cell == '█').count();
        assert_eq!((cells(0, 60), cells(30, 60), cells(60, 60)), (0, GAUGE_CELLS / 2, GAUGE_CELLS));
        assert_eq!((cells(70, 60), cells(0, 0)), (GAUGE_CELLS, 0), "whatever it is given");
    }
}
