//! Notices by mail.

use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{QUICK, inbox_row, until_letter, until_notice, until_sent};
use crate::support::{App, Mails, Taking, TestDb, each_database};

each_database!(
    a_notice_is_mailed_once,
    a_server_that_cannot_just_now_is_tried_again,
    a_mail_that_is_refused_is_a_dead_letter,
    a_mail_that_may_have_gone_out_is_not_sent_again,
    a_mail_that_may_have_gone_out_is_sent_again_if_told_so,
    a_server_that_is_away_has_surely_got_nothing,
);

fn by_mail<'a>(url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let channel = ["--notify-channel", "smtp", "--smtp-url", url];
    let whom = ["--smtp-from", "Stockade <stockade@example.com>", "--smtp-to", "orders@example.com"];
    [channel.as_slice(), &whom, &QUICK, more].concat()
}

async fn a_notice_is_mailed_once(db: TestDb) {
    let server = Mails::open([]).await;
    let app = App::start_with(&db, &by_mail(&server.url, &[])).await;
    let order = app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let (notice, _) = until_sent(&app).await;
    assert_eq!(notice["channel"], "smtp");
    let mail = server.until_mailed(1).await.remove(0);
    let has = |line: &str| assert!(mail.lines().any(|there| there == line), "{line} in {mail}");
    has("From: Stockade <stockade@example.com>");
    has("To: orders@example.com");
    has(&format!("Subject: Order {}: reserved", order["id"].as_str().unwrap()));
    has(&format!("Message-ID: <{}@stockade>", notice["event_id"].as_str().unwrap()));
    has("Auto-Submitted: auto-generated");
    assert!(mail.contains("Your order is reserved, reservation RES-"), "{mail}");
    app.stop().await;
}

async fn a_server_that_cannot_just_now_is_tried_again(db: TestDb) {
    let server = Mails::open([Taking::RefusesRecipient(450), Taking::Refuses(451)]).await;
    let app = App::start_with(&db, &by_mail(&server.url, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let (_, row) = until_sent(&app).await;
    assert_eq!(row["attempts"], 3);
    server.until_mailed(2).await;
    app.stop().await;
}

async fn a_mail_that_is_refused_is_a_dead_letter(db: TestDb) {
    let server = Mails::open([Taking::RefusesRecipient(550)]).await;
    let app = App::start_with(&db, &by_mail(&server.url, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let letter = until_letter(&app).await;
    assert_eq!((&letter["reason"], &letter["attempts"]), (&json!("refused"), &json!(1)));
    assert!(letter["error"].as_str().unwrap().contains("550"), "{letter}");
    until_notice(&app, "failed").await;
    app.stop().await;
}

async fn a_mail_that_may_have_gone_out_is_not_sent_again(db: TestDb) {
    let server = Mails::open([Taking::HangsUp]).await;
    let app = App::start_with(&db, &by_mail(&server.url, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    assert_eq!(until_letter(&app).await["reason"], "outcome-unknown");
    until_notice(&app, "unknown").await;
    server.until_mailed(1).await;
    app.stop().await;
}

async fn a_mail_that_may_have_gone_out_is_sent_again_if_told_so(db: TestDb) {
    let server = Mails::open([Taking::HangsUp]).await;
    let app = App::start_with(&db, &by_mail(&server.url, &["--notify-repeat-unknown", "true"])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    until_sent(&app).await;
    let mails = server.until_mailed(2).await;
    assert_eq!(mails[0], mails[1], "the very same mail, to be told by its id");
    app.stop().await;
}

async fn a_server_that_is_away_has_surely_got_nothing(db: TestDb) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let url = format!("smtp://{address}");
    let app = App::start_with(&db, &by_mail(&url, &["--retry-max", "1000"])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let notice = until_notice(&app, "pending").await;
    assert_ne!(notice["last_error"], Value::Null);
    assert_ne!(inbox_row(&app, &notice).await["state"], "dead");
    let server = Mails::serve(TcpListener::bind(address).await.unwrap(), []);
    until_sent(&app).await;
    server.until_mailed(1).await;
    app.stop().await;
}
