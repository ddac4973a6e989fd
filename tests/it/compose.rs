//! The container files, held against what the binary really takes: settings, commands, ports, health checks. No image
//! is built or pulled here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::{Args, FromArgMatches};
use serde_json::Value;
use stockade::config::Settings;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(name)).unwrap()
}

/// The compose file, anchors and merges resolved.
fn compose() -> Value {
    serde_saphyr::from_str(&read("docker-compose.yml")).unwrap()
}

fn services() -> BTreeMap<String, Value> {
    serde_json::from_value(compose()["services"].clone()).unwrap()
}

/// The services that run our image.
fn ours() -> BTreeMap<String, Value> {
    services().into_iter().filter(|(_, service)| service["image"] == "stockade").collect()
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().map(|list| list.iter().map(|text| text.as_str().unwrap()).collect()).unwrap_or_default()
}

/// The instructions of the Dockerfile, each with what follows it, lines joined.
fn dockerfile() -> Vec<(String, String)> {
    let text = read("Dockerfile").replace("\\\n", " ");
    let instructions = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    instructions
        .map(|line| {
            let (instruction, rest) = line.split_once(' ').unwrap();
            (instruction.to_owned(), rest.split_whitespace().collect::<Vec<_>>().join(" "))
        })
        .collect()
}

/// The last stage: what the image is.
fn image() -> Vec<(String, String)> {
    let instructions = dockerfile();
    let from = instructions.iter().rposition(|(instruction, _)| instruction == "FROM").unwrap();
    instructions[from..].to_vec()
}

fn in_image(instruction: &str) -> String {
    let found = image().into_iter().rfind(|(name, _)| name == instruction);
    found.unwrap_or_else(|| panic!("the image has no {instruction}")).1
}

/// `["stockade", "serve"]`
fn words(json: &str) -> Vec<String> {
    serde_json::from_str(json).unwrap_or_else(|_| panic!("{json} is no list of words, and there is no shell"))
}

/// The variables that the image sets.
fn image_env() -> BTreeMap<String, String> {
    let pairs = in_image("ENV");
    pairs.split(' ').map(|pair| pair.split_once('=').unwrap()).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// What a container of a service finds in its environment.
fn environment(service: &Value) -> BTreeMap<String, String> {
    let mut all = image_env();
    for (name, value) in service["environment"].as_object().unwrap() {
        let value = value.as_str().unwrap_or_else(|| panic!("{name}: quote it, it is text for the binary"));
        all.insert(name.clone(), value.to_owned());
    }
    all
}

/// Reads variables as `serve` would; panics at one that it does not know.
fn settings(environment: &BTreeMap<String, String>) -> Settings {
    let command = Settings::augment_args(clap::Command::new("serve"));
    let mut flags = vec!["serve".to_owned()];
    for (name, value) in environment.iter().filter(|(name, _)| is_ours(name)) {
        let argument =
            command.get_arguments().find(|argument| argument.get_env().is_some_and(|env| env == name.as_str()));
        let argument = argument.unwrap_or_else(|| panic!("the binary has no setting {name}"));
        let flag = format!("--{}", argument.get_long().unwrap());
        match argument.get_action() {
            clap::ArgAction::SetTrue => flags.extend(value.parse::<bool>().unwrap().then_some(flag)),
            _ => flags.push(format!("{flag}={value}")),
        }
    }
    Settings::from_arg_matches(&command.try_get_matches_from(flags).unwrap()).unwrap()
}

fn is_ours(variable: &str) -> bool {
    variable.starts_with("STOCKADE_") || variable == "METRICS_TOKEN"
}

/// Does the binary take these arguments? `--help` comes last, so that it is reached only if all before it is known.
fn is_taken(arguments: &[String]) -> bool {
    let output = Command::new(env!("CARGO_BIN_EXE_stockade")).args(arguments).arg("--help").output().unwrap();
    output.status.success()
}

/// The folders beside `src` that sources include files of.
fn included_from_beside(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(included_from_beside(&path));
        } else {
            let text = fs::read_to_string(&path).unwrap();
            let includes = ["include_str!(", "migrations!("].into_iter().flat_map(|call| text.split(call).skip(1));
            let paths = includes.filter_map(|rest| rest.trim_start().strip_prefix("\"../"));
            found.extend(paths.map(|path| path.trim_start_matches("../").split(['/', '"']).next().unwrap().to_owned()));
            let embedded = text.split("#[folder = \"").skip(1);
            found.extend(embedded.map(|rest| rest.split('/').next().unwrap().to_owned()));
        }
    }
    found
}

/// What a container of a service runs.
fn command_line(service: &Value) -> Vec<String> {
    let given = |name: &str| texts(&service[name]).into_iter().map(str::to_owned).collect::<Vec<_>>();
    let mut line = match given("entrypoint") {
        none if none.is_empty() => words(&in_image("ENTRYPOINT")),
        entrypoint => entrypoint,
    };
    match (service["entrypoint"].is_null(), given("command")) {
        (true, none) if none.is_empty() => line.extend(words(&in_image("CMD"))),
        (_, command) => line.extend(command),
    }
    assert_eq!(line.remove(0), "stockade");
    line
}

#[test]
fn every_setting_is_one_that_the_binary_has() {
    assert_eq!(&*settings(&image_env()).database_url, "sqlite:/data/stockade.db");
    let mut seen = 0;
    for (name, service) in ours() {
        let settings = settings(&environment(&service));
        assert!(settings.database_url.starts_with("postgres://"), "{name}");
        assert!(settings.broker_url.starts_with("amqp://"), "{name}");
        settings.validate().unwrap_or_else(|error| panic!("{name}: {error}"));
        seen += 1;
    }
    assert_eq!(seen, 3, "stockade, instance, demo");
}

#[test]
#[should_panic(expected = "the binary has no setting STOCKADE_COLOUR")]
fn a_setting_that_the_binary_lacks_is_noticed() {
    settings(&BTreeMap::from([("STOCKADE_COLOUR".to_owned(), "blue".to_owned())]));
}

#[test]
fn every_command_is_one_that_the_binary_takes() {
    let lines: BTreeMap<String, Vec<String>> =
        ours().into_iter().map(|(name, service)| (name, command_line(&service))).collect();
    assert_eq!((lines["stockade"].join(" "), lines["instance"].join(" ")), ("serve".into(), "serve".into()));
    assert_eq!(lines["demo"].join(" "), "demo all");
    let health = in_image("HEALTHCHECK");
    let (_, health) = health.split_once(" CMD ").unwrap();
    let health = words(health)[1..].to_vec();
    assert_eq!(health, ["healthcheck"]);
    for line in lines.into_values().chain([health]) {
        assert!(is_taken(&line), "{line:?}");
    }
    for nonsense in [["serve", "--colour"], ["demo", "dance"]] {
        assert!(!is_taken(&nonsense.map(str::to_owned)), "{nonsense:?}: or this test proves nothing");
    }
}

#[test]
fn ports_are_published_on_loopback_only_and_lead_to_where_the_server_listens() {
    for (name, service) in services() {
        for port in texts(&service["ports"]) {
            assert!(port.starts_with("127.0.0.1:"), "{name}: {port}");
        }
        assert!(service["network_mode"].is_null(), "{name}");
    }
    let stockade = &services()["stockade"];
    let listen = settings(&environment(stockade)).listen;
    assert!(listen.ip().is_unspecified(), "or nobody gets into the container");
    assert_eq!(texts(&stockade["ports"]), [format!("127.0.0.1:8080:{}", listen.port())]);
    assert_eq!(in_image("EXPOSE"), settings(&image_env()).listen.port().to_string());
}

#[test]
fn everybody_waits_for_what_they_need_to_be_healthy() {
    let services = services();
    for (name, service) in ours() {
        let needs = service["depends_on"].as_object().unwrap();
        assert_eq!(needs.keys().collect::<Vec<_>>(), ["postgres", "rabbitmq"], "{name}");
        for (need, how) in needs {
            assert_eq!(how["condition"], "service_healthy", "{name}");
            let test = texts(&services[need]["healthcheck"]["test"]);
            assert!(test.len() >= 2 && test[0].starts_with("CMD"), "{need}: {test:?}");
        }
        // The image's own check holds for whoever serves.
        let serves = command_line(&service)[0] == "serve";
        assert_eq!(service["healthcheck"].is_null(), serves, "{name}");
        let grace = humantime::parse_duration(service["stop_grace_period"].as_str().unwrap()).unwrap();
        let drain = settings(&environment(&service)).shutdown_drain;
        assert!(grace >= drain + Duration::from_secs(5), "{name} is killed after {grace:?} but may take {drain:?}");
    }
    let timeout = in_image("HEALTHCHECK").split("--timeout=").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    let help = Command::new(env!("CARGO_BIN_EXE_stockade")).args(["healthcheck", "--help"]).output().unwrap();
    assert!(String::from_utf8(help.stdout).unwrap().contains("[default: 3s]"), "the check gives up by itself");
    assert!(humantime::parse_duration(&timeout).unwrap() > Duration::from_secs(3), "before it is given up on");
}

#[test]
fn the_urls_fit_the_services_they_name() {
    let (services, compose) = (services(), compose());
    let (postgres, rabbit) = (&services["postgres"], &services["rabbitmq"]);
    let of = |service: &Value, name: &str| service["environment"][name].as_str().unwrap().to_owned();
    let user = |service, user, password| format!("{}:{}", of(service, user), of(service, password));
    let environment = environment(&services["stockade"]);
    let login = user(postgres, "POSTGRES_USER", "POSTGRES_PASSWORD");
    let url = format!("postgres://{login}@postgres:5432/{}", of(postgres, "POSTGRES_DB"));
    assert_eq!(environment["STOCKADE_DATABASE_URL"], url);
    let login = user(rabbit, "RABBITMQ_DEFAULT_USER", "RABBITMQ_DEFAULT_PASS");
    assert_eq!(environment["STOCKADE_BROKER_URL"], format!("amqp://{login}@rabbitmq:5672/%2f"));
    assert!(rabbit["image"].as_str().unwrap().ends_with("-management"));
    assert_eq!(rabbit["hostname"], "rabbitmq", "its data goes by its name");
    for (service, folder) in [(postgres, "/var/lib/postgresql/data"), (rabbit, "/var/lib/rabbitmq")] {
        let mount = texts(&service["volumes"])[0].to_owned();
        let (volume, inside) = mount.split_once(':').unwrap();
        assert_eq!(inside, folder);
        assert!(compose["volumes"].as_object().unwrap().contains_key(volume), "a named volume: {volume}");
    }
}

#[test]
fn profiles_add_instances_and_demos_and_nothing_else() {
    let services = services();
    let profile = |service: &Value| texts(&service["profiles"]).join(" ");
    let profiles: Vec<(&str, String)> =
        services.iter().map(|(name, service)| (name.as_str(), profile(service))).collect();
    let plain = |name| (name, String::new());
    assert_eq!(
        profiles,
        [
            ("demo", "demo".into()),
            ("instance", "scale".into()),
            plain("postgres"),
            plain("rabbitmq"),
            plain("stockade")
        ]
    );
    let instance = &services["instance"];
    assert!(instance["deploy"]["replicas"].as_u64().unwrap() >= 2);
    assert!(instance["ports"].is_null(), "two cannot have one port");
    assert_eq!(instance["environment"], services["stockade"]["environment"], "or they would not share the work");
    assert_eq!(services["demo"]["restart"], "no");
}

#[test]
fn the_image_runs_as_nobody_special() {
    let user = in_image("USER");
    let ids: Vec<u32> = user.split(':').map(|id| id.parse().unwrap()).collect();
    assert!(ids.len() == 2 && !ids.contains(&0), "{user}");
    let data = image().into_iter().find(|(name, rest)| name == "COPY" && rest.ends_with("/data /data")).unwrap();
    assert!(data.1.contains(&format!("--chown={user} ")), "it can write its database: {}", data.1);
}

#[test]
fn the_build_copies_all_that_the_sources_include_and_keeps_dependencies_apart() {
    let instructions = dockerfile();
    let position = |wanted: &str| {
        let found = instructions.iter().position(|(name, rest)| format!("{name} {rest}").starts_with(wanted));
        found.unwrap_or_else(|| panic!("no {wanted}"))
    };
    let builds: Vec<usize> =
        (0..instructions.len()).filter(|index| instructions[*index].1.contains("cargo build")).collect();
    let [dependencies, sources] = builds[..] else { panic!("two builds") };
    assert!(position("COPY Cargo.toml Cargo.lock") < dependencies && position("COPY .cargo") < dependencies);
    assert!(dependencies < position("COPY src") && position("COPY src") < sources);
    assert!(builds.iter().all(|build| instructions[*build].1.contains("--release --locked --bin stockade")));

    // Cargo.toml says which compiler is needed, the sources what they include from beside themselves.
    let rust_version =
        read("Cargo.toml").split("rust-version = \"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    assert!(instructions[0].1.starts_with(&format!("rust:{rust_version}-")), "{}", instructions[0].1);
    let included = included_from_beside(&Path::new(ROOT).join("src"));
    let of_the_kernel = included_from_beside(&Path::new(ROOT).join("crates/kernel/src"));
    let included: Vec<&str> = included.iter().map(String::as_str).collect();
    assert_eq!(included, ["migrations", "static"]);
    assert_eq!(of_the_kernel.into_iter().collect::<Vec<_>>(), ["migrations"], "below crates/kernel");
    let ignored = read(".dockerignore");
    for folder in included.iter().copied().chain(["crates", "src", ".cargo", "Cargo.toml", "Cargo.lock"]) {
        assert!(ignored.lines().any(|line| line == format!("!{folder}")), "{folder} is not sent to the build");
    }
    assert!(ignored.lines().any(|line| line == "*"), "target and .git are not sent along");
    for folder in included {
        assert!(position(&format!("COPY {folder} ")) < sources);
    }
}

#[test]
fn commands_in_the_documentation_name_what_is_there() {
    let services = services();
    let mut seen = 0;
    for page in ["README.md", "docs/demos.md", "docs/operating.md", "docker-compose.yml"] {
        for line in read(page).lines().filter_map(|line| line.split("docker compose ").nth(1)) {
            let words: Vec<&str> = line.split_whitespace().take_while(|word| !word.starts_with('#')).collect();
            for pair in words.windows(2).filter(|pair| pair[0] == "--profile") {
                let known = services.values().any(|service| texts(&service["profiles"]).contains(&pair[1]));
                assert!(known, "{page}: {line}");
            }
            if let Some(run) = words.iter().position(|word| *word == "run") {
                let mut rest = words[run + 1..].iter().skip_while(|word| word.starts_with('-'));
                let service = &services[*rest.next().unwrap()];
                let mut line_run = texts(&service["entrypoint"])[1..].to_vec();
                line_run.extend(rest);
                assert!(is_taken(&line_run.iter().map(|&word| word.to_owned()).collect::<Vec<_>>()), "{page}: {line}");
            }
            seen += 1;
        }
    }
    assert!(seen >= 5, "{seen}");
}

/// By the tool itself, where it is there: the older one with a hyphen, or the newer one.
#[test]
fn compose_reads_the_file() {
    for program in [["docker-compose"].as_slice(), &["docker", "compose"]] {
        let command = || {
            let mut command = Command::new(program[0]);
            command.args(&program[1..]).current_dir(ROOT);
            command
        };
        if !command().arg("version").output().is_ok_and(|output| output.status.success()) {
            continue;
        }
        for profiles in [[].as_slice(), &["--profile", "scale"], &["--profile", "demo"]] {
            let output = command().args(profiles).args(["config", "--quiet"]).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
