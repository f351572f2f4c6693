// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// storeSite has a store, and a directory with the files of an operator who fills it.
type storeSite struct {
	t    *testing.T
	dir  string
	file string // the configuration file of a balancer
	etcd *etcdtest.Server
}

func newStoreSite(t *testing.T) *storeSite {
	t.Helper()
	s := &storeSite{t: t, dir: t.TempDir(), etcd: etcdtest.Start(t)}
	s.file = s.write("lb.yaml", fmt.Sprintf(`
node: {instance: edge, name: lb1, interface: eth0, addresses: ["2001:db8::1"], state: %q}
store: {etcd: {endpoints: [%q], prefix: /segue/main}}
`, s.dir, s.etcd.Endpoint()))
	return s
}

// join makes a balancer a member of the fleet. It saves generations of an earlier service first, so
// that the balancer need not leave the lease to others.
func (s *storeSite) join(b *control.Balancer) *control.Fleet {
	s.t.Helper()
	former := serversets.Generations{"former": {Number: 1}}
	testhost.Must(s.t, former.Save(serversets.File(s.dir, b.Desired().Node.Instance)))
	fleet, err := b.Join(s.t.Context(), slog.New(slog.DiscardHandler))
	testhost.Must(s.t, err)
	return fleet
}

func (s *storeSite) write(name, text string) (path string) { return writeFile(s.t, s.dir, name, text) }

// services writes a file with a service that has the named servers. The text more follows them.
func (s *storeSite) services(more string, servers ...string) (path string) {
	s.t.Helper()
	text := "services:\n- name: web\n  vip: \"2001:db8:80::1\"\n  port: 80\n  protocol: tcp\n" +
		"  encapsulation: gre\n  servers:\n"
	for _, name := range servers {
		text += fmt.Sprintf("  - {name: %s, address: \"2001:db8:1::%s\"}\n", name, name[1:])
	}
	return s.write("services.yaml", text+more)
}

func (s *storeSite) run(args ...string) (string, error) {
	return runSegue(s.t.Context(), append([]string{"store"}, args...)...)
}

// want runs a command that must succeed, and whose output must have all texts.
func (s *storeSite) want(args []string, texts ...string) string {
	s.t.Helper()
	out, err := s.run(args...)
	if err != nil {
		s.t.Errorf("segue store %s: %v", strings.Join(args, " "), err)
	}
	for _, text := range texts {
		if !strings.Contains(out, text) {
			s.t.Errorf("segue store %s: no %q in\n%s", strings.Join(args, " "), text, out)
		}
	}
	return out
}

// refuse runs a command that must fail with an error that contains why.
func (s *storeSite) refuse(why string, args ...string) {
	s.t.Helper()
	if out, err := s.run(args...); err == nil || !strings.Contains(err.Error(), why) {
		s.t.Errorf("segue store %s: output %q, error %v; want %q", strings.Join(args, " "), out, err, why)
	}
}

// TestStoreImport imports into an empty store, and then into a store that has services. It also
// imports the output of an export.
func TestStoreImport(t *testing.T) {
	t.Parallel()
	s := newStoreSite(t)
	imports := func(path string, more ...string) []string {
		return append([]string{"import", "-c", s.file, path}, more...)
	}
	exports := []string{"export", "-c", s.file}
	s.refuse("the store has no services", exports...)
	s.refuse("the store has no services", imports(s.services("", "s1"), "--replace")...)

	override := "overrides:\n- {service: web, server: s1, set: {drained: true}}\n"
	s.want(imports(s.services(override, "s1", "s2", "s3", "s4"), "--dry-run"), "dry run: service web added\n")
	s.refuse("the store has no services", exports...)
	s.want(imports(s.services(override, "s1", "s2", "s3", "s4")), "service web added\n", "-1: 1 service\n")
	text := s.want(exports, "name: s4", "drained: true")
	s.refuse("--replace replaces its services", imports(s.services("", "s1"))...)

	// The override stays, and each import within the limit has a version of its own.
	s.want(imports(s.services("", "s1", "s2", "s3"), "--replace", "--dry-run"), "dry run: server web/s4 removed\n")
	if now := s.want(exports); now != text {
		t.Errorf("a dry run has changed the store:\n%s", now)
	}
	s.want(imports(s.services("", "s1", "s2", "s3"), "--replace"), "server web/s4 removed\n", "-2: 1 service\n")
	s.want(exports, "drained: true")
	configuration, err := os.ReadFile(s.file)
	testhost.Must(t, err)
	piped, err := runSegueWith(t.Context(), string(configuration), "store", "export", "-c", "-")
	if err != nil || !strings.Contains(piped, "drained: true") {
		t.Errorf("export of a store that standard input names: error %v, output\n%s", err, piped)
	}
	out, err := runSegueWith(t.Context(), piped, "store", "import", "-c", s.file, "-", "--replace", "--dry-run")
	if err != nil || out != "" {
		t.Errorf("import of the export by standard input: error %v, output\n%s", err, out)
	}
	_, err = runSegueWith(t.Context(), "node: {\n", "store", "export", "-c", "-")
	if err == nil || !strings.HasPrefix(err.Error(), "standard input:2: ") {
		t.Errorf("broken standard input: error %v", err)
	}
	s.refuse("2 of 3 servers of web, the last in service, and the limit is 30 percent: permit it by --allow-removals",
		imports(s.services("", "s1"), "--replace")...)
	s.want(imports(s.services("", "s1"), "--replace", "--allow-removals"), "-3: 1 service\n")

	backup := s.write("backup.yaml", text)
	s.want(imports(backup, "--replace"), "-4: 1 service\n")
	if now := s.want(exports); now != text {
		t.Errorf("the import of an export has another export:\n%s\nwant:\n%s", now, text)
	}
}

// TestStoreRefusals checks errors, which name the file or the argument. The store stays empty.
func TestStoreRefusals(t *testing.T) {
	t.Parallel()
	s := newStoreSite(t)
	good := s.services("", "s1")
	bad := s.write("bad.yaml", "services:\n- {name: web, vip: none}\n")
	alone := s.write("alone.yaml", "node: {interface: eth0, addresses: [\"2001:db8::1\"]}\n"+fileText(t, good))
	s.refuse("missing -c FILE", "import", good)
	s.refuse("missing SERVICES", "import", "-c", s.file)
	s.refuse(filepath.Base(bad), "import", "-c", s.file, bad)
	s.refuse("no such file", "import", "-c", s.file, filepath.Join(s.dir, "none.yaml"))
	s.refuse("has no section store", "import", "-c", alone, good)
	s.refuse("has no section store", "export", "-c", alone)
	s.refuse("edge.store.json: missing", "export", "-c", s.file, "--cache")
	s.refuse("missing VERSION", "confirm")
	s.refuse("unexpected argument", "status", "web")
	s.refuse("the store has no services", "export", "-c", s.file)
	s.etcd.Stop()
	defer s.etcd.Continue()
	s.refuse("read the store: no answer in time", "export", "-c", s.file, "--timeout", "300ms")
	s.refuse("no answer in time", "import", "-c", s.file, good, "--timeout", "300ms")
}

// TestStoreExportOfCache checks that a balancer's own file exports the same text as the store.
func TestStoreExportOfCache(t *testing.T) {
	t.Parallel()
	s := newStoreSite(t)
	s.want([]string{"import", "-c", s.file, s.services("", "s1", "s2")})
	want := s.want([]string{"export", "-c", s.file})
	c, _, err := control.LoadBalancer(s.file)
	testhost.Must(t, err)
	fleet := s.join(c)
	testhost.Must(t, fleet.First(t.Context(), func(store.Status) {}))
	if err := fleet.Await(t.Context(), func(store.Status) bool {
		_, err := os.Stat(store.CacheFile(s.dir, "edge"))
		return err == nil
	}); err != nil {
		t.Fatal(err)
	}
	expected := `
		# HELP segue_lb_store_followed 1 if the balancer follows the store, 0 if it keeps an earlier state or cannot follow the newest version.
		# TYPE segue_lb_store_followed gauge
		segue_lb_store_followed 1
	`
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(storeMetrics{fleet})
	if err := testutil.GatherAndCompare(registry, strings.NewReader(expected), "segue_lb_store_followed"); err != nil {
		t.Error(err)
	}
	testhost.Must(t, fleet.Close())
	s.etcd.Kill()
	// The command opens no connection, so it does not need the password file.
	alone := s.write("alone.yaml", strings.Replace(fileText(t, s.file), "etcd: {",
		"etcd: {username: segue, password-file: /none, ", 1))
	if got := s.want([]string{"export", "-c", alone, "--cache"}); got != want {
		t.Errorf("the cache has\n%s\nwant\n%s", got, want)
	}
	other := s.write("other.yaml", strings.Replace(fileText(t, s.file), "/segue/main", "/segue/other", 1))
	s.refuse("of another fleet than /segue/other", "export", "-c", other, "--cache")
}

func fileText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	testhost.Must(t, err)
	return string(text)
}

// TestPrintStore checks the text for each problem. An unsaved state is no failure.
func TestPrintStore(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 11, 22, 9, 12, 40, 0, time.UTC)
	for name, c := range map[string]struct {
		state api.Store
		want  string
		fails bool
	}{
		"follows": {
			api.Store{Reachable: true, Follows: "a-7", Newest: "a-7", Leader: "lb1"},
			"follows: a-7\nnewest:  a-7\nleader:  lb1\n", false,
		},
		"nothing yet": {
			api.Store{Since: since, Problem: "refused"},
			"follows: none\nnewest:  none\nleader:  none\n" +
				"NOT REACHABLE since 2026-11-22T09:12:40Z, the balancer waits for its services: refused\n",
			true,
		},
		"away": {
			api.Store{Since: since, Problem: "refused", Follows: "a-7", Newest: "a-7", Leader: "lb1"},
			"follows: a-7\nnewest:  a-7\nleader:  lb1\n" +
				"NOT REACHABLE since 2026-11-22T09:12:40Z, the balancer continues with its last state: refused\n",
			true,
		},
		"held": {
			api.Store{Reachable: true, Follows: "a-7", FromCache: true, Newest: "a-8", Held: "too many"},
			"follows: a-7, from the balancer's own file\nnewest:  a-8\nleader:  none\nNOT FOLLOWED: too many\n", true,
		},
		"unsaved": {
			api.Store{Reachable: true, Follows: "a-7", Newest: "a-7", Leader: "lb1", Unsaved: "disk full"},
			"follows: a-7\nnewest:  a-7\nleader:  lb1\n" +
				"NOT SAVED, a restart without the store would use an older state: disk full\n", false,
		},
	} {
		var out bytes.Buffer
		err := printStore(&out, &c.state)
		if out.String() != c.want || errors.Is(err, errNotFollowing) != c.fails {
			t.Errorf("%s: error %v, output\n%swant\n%s", name, err, &out, c.want)
		}
	}
}

// TestPublishStore checks that each change of the store's condition is one event.
func TestPublishStore(t *testing.T) {
	t.Parallel()
	up := store.Status{Reachable: true}
	down := store.Status{Problem: "refused"}
	held := store.Status{Reachable: true, Held: "too many"}
	heldOtherwise := store.Status{Reachable: true, Held: "not valid"}
	stream := events.NewStream()
	before := up
	for _, now := range []store.Status{up, down, down, up, held, held, heldOtherwise, up} {
		publishStore(stream, before, now)
		before = now
	}
	list, err := stream.After(t.Context(), 0)
	testhost.Must(t, err)
	var got []string
	for _, e := range list {
		got = append(got, fmt.Sprintf("%s %s", e.Kind, e.Reason))
	}
	want := []string{
		"store_down refused", "store_up ", "store_held too many", "store_held not valid", "store_followed ",
	}
	if !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}

// runner is a balancer without a data path.
type runner struct{}

func (runner) Reload(context.Context, *desired.Balancer, desired.Secrets) error { return nil }

func (runner) Follow(
	context.Context, *desired.Balancer, desired.Secrets, serversets.Generations,
) error {
	return nil
}

func (runner) Losses(context.Context, *desired.Balancer) ([]desired.Loss, error) { return nil, nil }

// serveFleet serves the API of a balancer that follows the store.
func (s *storeSite) serveFleet() (instance string, fleet *control.Fleet) {
	s.t.Helper()
	instance, c := s.serveStart()
	testhost.Must(s.t, c.Fleet().First(s.t.Context(), func(store.Status) {}))
	c.Attach(runner{}, func([]desired.Override, []desired.InvalidOverride) {})
	c.handler.Start(api.Balancer{
		Control: c.Balancer, Reload: c.Reload, Events: events.NewStream(),
	}.Handler())
	return instance, c.Fleet()
}

// starting is a balancer that has joined its fleet and has not started yet.
type starting struct {
	*control.Balancer
	handler *api.Starting
}

// serveStart serves the API of a balancer that waits for the store, as before its start.
func (s *storeSite) serveStart() (instance string, c *starting) {
	s.t.Helper()
	if os.Geteuid() != 0 {
		s.t.Skip("only root can write below /run/segue")
	}
	instance = fmt.Sprintf("test-%d-%s", os.Getpid(), strings.ToLower(s.t.Name()))
	s.file = s.write("lb.yaml", strings.Replace(fileText(s.t, s.file), "instance: edge", "instance: "+instance, 1))
	b, _, err := control.LoadBalancer(s.file)
	testhost.Must(s.t, err)
	log := slog.New(slog.DiscardHandler)
	fleet := s.join(b)
	c = &starting{b, api.NewStarting(b)}
	lock, err := rundir.Lock(instance)
	testhost.Must(s.t, err)
	socket, err := api.Listen(instance, "", log)
	testhost.Must(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- socket.Run(ctx, c.handler) }()
	s.t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, fleet.Close(), rundir.Unlock(lock)); err != nil {
			s.t.Error(err)
		}
	})
	return instance, c
}

// TestStoreStatusBeforeStart checks that a balancer that waits for the store shows this in its
// status, and refuses changes.
func TestStoreStatusBeforeStart(t *testing.T) {
	t.Parallel()
	s := newStoreSite(t)
	s.etcd.Kill()
	instance, _ := s.serveStart()
	out, err := s.run("status", "-i", instance)
	if !errors.Is(err, errNotFollowing) || !strings.Contains(out, "follows: none\n") ||
		!strings.Contains(out, "the balancer waits for its services: it has not answered yet\n") {
		t.Errorf("error %v, output\n%s", err, out)
	}
	out, err = s.run("status", "-i", instance, "--json")
	var state api.Store
	if !errors.Is(err, errNotFollowing) || json.Unmarshal([]byte(out), &state) != nil || state.Reachable || state.Problem == "" {
		t.Errorf("as JSON: error %v, output\n%s", err, out)
	}
	edit := api.Edit{Override: api.Override{Service: "web", Remove: true}}
	_, err = api.NewClient(instance).Change(t.Context(), false, edit)
	if err == nil || !strings.Contains(err.Error(), "it waits for the store of its services") {
		t.Errorf("a change: error %v", err)
	}
}

// TestStoreConfirm checks that an operator can confirm only the version that the status has shown.
func TestStoreConfirm(t *testing.T) {
	t.Parallel()
	s := newStoreSite(t)
	s.want([]string{"import", "-c", s.file, s.services("", "s1", "s2", "s3", "s4")})
	instance, fleet := s.serveFleet()
	on := func(args ...string) []string { return append(args, "-i", instance) }
	testhost.Must(t, fleet.Await(t.Context(), func(now store.Status) bool { return now.Held == "" }))
	s.want(on("status"), "-1\nleader: ")
	// Imports with this file have no limit for removals. The balancer has the default limit.
	loose := s.write("loose.yaml",
		strings.Replace(fileText(t, s.file), "store: {", "store: {max-removed-percent: 100, ", 1))
	keepOnly := func(servers ...string) (version string) {
		s.want([]string{"import", "-c", loose, s.services("", servers...), "--replace"})
		err := fleet.Await(t.Context(), func(now store.Status) bool {
			version = now.Confirmable.String()
			return now.Confirmable != (store.Version{}) && now.Confirmable == now.Newest
		})
		testhost.Must(t, err)
		return version
	}
	seen := keepOnly("s1", "s2")
	out, err := s.run(on("status")...)
	if want := "segue store confirm " + seen; !errors.Is(err, errNotFollowing) || !strings.Contains(out, want) {
		t.Errorf("status: error %v, output\n%s\nwant %s", err, out, want)
	}
	newer := strings.TrimSuffix(seen, "2") + "3"
	s.refuse("has another version", on("confirm", newer)...)
	s.refuse("must be EPOCH-CHANGE", on("confirm", "2")...)
	s.want(on("confirm", seen), "follows: "+seen+"\n")
	s.want(on("confirm", seen), "follows: "+seen+"\n")
}

// TestStoreUnfit writes content that no balancer can follow. The status and the metric show this,
// and the status names the cure. An import replaces the content.
func TestStoreUnfit(t *testing.T) {
	t.Parallel()
	s := newStoreSite(t)
	good := s.services("", "s1", "s2")
	s.want([]string{"import", "-c", s.file, good})
	instance, fleet := s.serveFleet()
	write := func(key, value string) {
		t.Helper()
		files, err := (&storeOptions{file: s.file}).load(nil)
		testhost.Must(t, err)
		s, err := openStore(files)
		testhost.Must(t, err)
		defer s.Close()
		_, err = s.Apply(t.Context(), store.Change{Edit: func(tree store.Tree) (store.Tree, error) {
			tree[key] = json.RawMessage(value)
			return tree, nil
		}})
		testhost.Must(t, err)
	}
	await := func(condition func(store.Status) bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if err := fleet.Await(ctx, condition); err != nil {
			t.Fatalf("%v; status %+v", err, fleet.Status())
		}
	}
	for _, c := range []struct{ key, value, want string }{
		{"servers/web/s1", `{"address":"x"}`, `web/s1.address "x": must be an IP address`},
		{"servers/web/s1", `7`, "key servers/web/s1: "},
	} {
		write(c.key, c.value)
		// Held can also say, for a moment, that nobody has made generations yet.
		await(func(now store.Status) bool { return strings.Contains(now.Held, c.want) })
		out, err := s.run("status", "-i", instance)
		if !errors.Is(err, errNotFollowing) || !strings.Contains(out, c.want) ||
			!strings.Contains(out, "segue store import --replace") {
			t.Errorf("status: error %v, output\n%s\nwant %s", err, out, c.want)
		}
		if got := followedMetric(t, fleet); got != 0 {
			t.Errorf("the metric is %v", got)
		}
		s.want([]string{"import", "-c", s.file, good, "--replace"})
		await(func(now store.Status) bool { return now.Held == "" && now.Follows == now.Newest })
	}
	write("overrides/web/s1", "7")
	s.refuse("key overrides/web/s1", "import", "-c", s.file, good, "--replace")
	others := s.services("overrides:\n- {service: web, server: s2, set: {drained: true}}\n", "s1", "s2")
	s.want([]string{"import", "-c", s.file, others, "--replace"})
	await(func(now store.Status) bool { return now.Held == "" && now.Follows == now.Newest })
}

func followedMetric(t *testing.T, fleet *control.Fleet) float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(storeMetrics{fleet})
	families, err := registry.Gather()
	testhost.Must(t, err)
	for _, family := range families {
		if family.GetName() == "segue_lb_store_followed" {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatal("no metric")
	return 0
}
