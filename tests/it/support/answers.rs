//! What tests ask of every answer: problems that are whole, lists that can be walked.

use reqwest::Response;
use serde_json::Value;

use super::Api;

/// An answer that must be this problem, whole: media type, code, status and request id.
pub async fn problem(response: Response, status: u16, code: &str) -> Value {
    let url = response.url().clone();
    assert_eq!(response.status().as_u16(), status, "{url}");
    let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    assert_eq!(header("content-type").as_deref(), Some("application/problem+json"), "{url}");
    let request_id = header("x-request-id").expect("every answer carries its request id");
    if status == 503 {
        assert!(header("retry-after").is_some_and(|seconds| seconds.parse::<u32>().unwrap() > 0), "{url}");
    }
    let problem: Value = response.json().await.unwrap();
    assert_eq!(problem["code"], code, "{url}: {problem}");
    assert_eq!(problem["type"], format!("/problems/{code}"));
    assert_eq!(problem["status"], status);
    assert_eq!(problem["request_id"], *request_id);
    assert_eq!(problem["instance"], url.path());
    for words in ["title", "detail"] {
        assert!(problem[words].as_str().is_some_and(|text| !text.is_empty()), "{url}: {problem}");
    }
    problem
}

/// A validation problem that points at one field.
pub async fn wrong_field(response: Response, pointer: &str) -> Value {
    let problem = problem(response, 422, "validation").await;
    let errors = problem["errors"].as_array().expect("errors[]");
    assert_eq!(errors.len(), 1, "{problem}");
    assert_eq!(errors[0]["pointer"], pointer, "{problem}");
    assert!(!errors[0]["detail"].as_str().unwrap().is_empty());
    problem
}

/// The fields of an object, in order of their names.
pub fn fields(object: &Value) -> Vec<&str> {
    let mut names: Vec<&str> = object.as_object().expect("an object").keys().map(String::as_str).collect();
    names.sort_unstable();
    names
}

impl Api {
    /// Every row of a list, page by page along the Link header, which must say what `next_cursor` says.
    pub async fn walk(&self, path: &str) -> Vec<Value> {
        let mut rows = Vec::new();
        let mut next = Some(path.to_owned());
        while let Some(path) = next {
            let response = self.get(&path).send().await.unwrap();
            assert_eq!(response.status(), 200, "{path}");
            let link = response.headers().get("link").map(|link| link.to_str().unwrap().to_owned());
            let page: Value = response.json().await.unwrap();
            rows.extend(page["data"].as_array().unwrap().iter().cloned());
            assert_eq!(fields(&page), ["data", "next_cursor"]);
            next = link.map(|link| {
                let target = link.strip_prefix('<').and_then(|rest| rest.strip_suffix(">; rel=\"next\"")).unwrap();
                let cursor = page["next_cursor"].as_str().expect("a cursor where there is a link");
                assert!(target.contains(&format!("cursor={cursor}")), "{target}");
                assert!(!page["data"].as_array().unwrap().is_empty(), "a page before the last is never empty");
                target.to_owned()
            });
            assert!(next.is_some() || page["next_cursor"].is_null());
        }
        rows
    }
}
