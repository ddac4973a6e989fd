//! Tables for people: columns as wide as what is in them, and nothing in them that could drive a terminal.

use anstyle::Style;

const HEAD: Style = Style::new().bold();
const GAP: &str = "  ";

/// Lays rows out under their heads.
pub fn table<const N: usize>(heads: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = rows.into_iter().map(|row| row.map(|cell| printable(&cell))).collect();
    let mut widths = heads.map(|head| head.chars().count());
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: [&str; N]| {
        let padded: Vec<String> = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        padded.join(GAP).trim_end().to_owned()
    };
    let mut text = format!("{HEAD}{}{HEAD:#}\n", line(heads));
    for row in &rows {
        text.push_str(&line(row.each_ref().map(String::as_str)));
        text.push('\n');
    }
    styled(&text)
}

/// `name  value` line by line.
pub fn facts(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:<width$}{GAP}{}\n", printable(value))).collect()
}

/// What a message says may hold anything, escape sequences among it: they are shown, not obeyed.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// The first characters of a text that is only to be recognised.
pub fn short(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Colours only where stdout takes them.
fn styled(text: &str) -> String {
    use std::io::IsTerminal;
    let plain = !std::io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if plain { anstream::adapter::strip_str(text).to_string() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text = table(["A", "LONGER"], [["wide cell".to_owned(), "x".to_owned()], ["y".to_owned(), String::new()]]);
        assert_eq!(text, "A          LONGER\nwide cell  x\ny\n");
        assert_eq!(facts(&[("a", "1".into()), ("long", "2".into())]), "a     1\nlong  2\n");
    }

    #[test]
    fn no_cell_can_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!((short("größer", 4), short("gr", 4)), ("größ…".to_owned(), "gr".to_owned()));
    }
}
