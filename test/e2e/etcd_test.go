// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/store"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/lab"
)

// site is a lab whose balancers have a store. Each reaches each member of it by a proxy of its own.
type site struct {
	*testing.T
	lab       *lab.Lab
	etcd      *etcdtest.Server  // the only member, or the one that a fault is about
	cluster   *etcdtest.Cluster // nil: the store has one member
	proxies   map[string]map[*etcdtest.Server]*etcdtest.Proxy
	balancers []string
	service   lab.Service
	file      string // the configuration of the first balancer
	services  string // a file with the services
}

// newSite makes the balancers of a lab take their services from a store with one member.
func newSite(t *testing.T, servers int) *site {
	t.Helper()
	s := &site{T: t, etcd: etcdtest.Start(t)}
	s.build(siteTopology(servers), "", s.etcd)
	return s
}

// newClusteredSite does the same as newSite with a store of three members.
func newClusteredSite(t *testing.T, servers int) *site {
	t.Helper()
	s := &site{T: t, cluster: etcdtest.StartCluster(t, 3)}
	s.build(siteTopology(servers), "", s.cluster.Members...)
	return s
}

// siteTopology returns the topology of a site with one service.
func siteTopology(servers int) lab.Topology {
	top := topology("http6-encap")
	top.Servers = servers
	return top
}

// build starts the lab of a site. The balancers' files also have the given sections.
func (s *site) build(top lab.Topology, sections string, members ...*etcdtest.Server) {
	s.Helper()
	t := s.T
	s.proxies = map[string]map[*etcdtest.Server]*etcdtest.Proxy{}
	s.lab = up(t, top)
	s.service = s.lab.Topology.Services[0]
	s.balancers = nodes(s.lab, lab.RoleBalancer)
	s.services = filepath.Join(t.TempDir(), "services.yaml")
	for _, name := range s.balancers {
		var endpoints []string
		s.proxies[name] = map[*etcdtest.Server]*etcdtest.Proxy{}
		for i, member := range members {
			address := fmt.Sprintf("127.0.0.%d:2379", i+1)
			listener, err := s.lab.Node(name).Listen(t.Context(), "tcp", address)
			must(t, err)
			s.proxies[name][member] = etcdtest.Serve(t, listener, member)
			endpoints = append(endpoints, fmt.Sprintf("%q", "http://"+address))
		}
		file := configFile(s.lab, name+"-balancer.yaml")
		text, err := os.ReadFile(file)
		must(t, err)
		own, services, ok := strings.Cut(string(text), "services:\n")
		if !ok {
			t.Fatalf("%s has no services", file)
		}
		own += fmt.Sprintf("store: {etcd: {endpoints: [%s], prefix: /segue/lab}}\n", strings.Join(endpoints, ", ")) + sections
		must(t, os.WriteFile(file, []byte(own), 0o644))
		must(t, os.WriteFile(s.services, []byte("services:\n"+services), 0o644))
	}
	s.file = configFile(s.lab, s.balancers[0]+"-balancer.yaml")
	s.run(s.balancers[0], "store", "import", "-c", s.file, s.services)
	for _, name := range s.balancers {
		p := s.lab.Process(name, "lb")
		must(t, p.Stop())
		must(t, p.Start(t.Context()))
	}
	awaitServers(t, s.lab)
}

// toStore does something with all ways of some balancers to the store, such as to cut them.
func (s *site) toStore(do func(*etcdtest.Proxy), balancers ...string) {
	for _, name := range balancers {
		for _, proxy := range s.proxies[name] {
			do(proxy)
		}
	}
}

// onlyReaches does something with the ways of a balancer to all members of the store but one.
func (s *site) onlyReaches(balancer string, m *etcdtest.Server, cut func(*etcdtest.Proxy)) {
	for other, proxy := range s.proxies[balancer] {
		if other != m {
			cut(proxy)
		}
	}
}

// run runs segue on a node and returns its output.
func (s *site) run(node string, args ...string) string {
	s.Helper()
	return command(s.T, s.lab, node, segue, args...)
}

// digest returns the digest of the generations of the service, and the servers that a balancer has
// in its tables with their conditions.
func (s *site) digest(balancer string) string {
	s.Helper()
	state := balancerStatus(s.T, s.lab.Node(balancer)).Services[0]
	text := fmt.Sprintf("generation %d %s:", state.Generation, state.Digest)
	for _, server := range state.Servers {
		text += fmt.Sprintf(" %s %s %g", server.Name, server.Condition, server.Share)
	}
	return text
}

// agree waits until all balancers have the same tables, and one of them fulfils a condition.
func (s *site) agree(condition func(digest string) bool) {
	s.Helper()
	eventually(s.T, func() error {
		first := s.digest(s.balancers[0])
		for _, other := range s.balancers[1:] {
			if now := s.digest(other); now != first {
				return fmt.Errorf("%s has %s, %s has %s", s.balancers[0], first, other, now)
			}
		}
		if !condition(first) {
			return fmt.Errorf("the balancers agree on %s", first)
		}
		return nil
	})
}

// has tells whether a digest names a server in a condition.
func has(server, condition string) func(string) bool {
	return func(digest string) bool { return strings.Contains(digest, " "+server+" "+condition+" ") }
}

func lacks(server string) func(string) bool {
	return func(digest string) bool { return !strings.Contains(digest, " "+server+" ") }
}

// TestStore drains a server by one balancer, for both. A new balancer process and a copy of the
// content know all.
func TestStore(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	name := s.service.Name + "/s1"
	if out := s.run("lb2", "drain", name); !strings.Contains(out, "is drained") {
		t.Errorf("drain: %s", out)
	}
	s.agree(has("s1", "drained"))
	visits, err := newClient(s.lab).visit(t.Context(), s.service, 50)
	must(t, err)
	if visits["s1"] > 0 {
		t.Errorf("%d of 50 new connections went to s1, which is drained", visits["s1"])
	}
	restart(t, s.lab.Process("lb1", "lb"))
	s.agree(has("s1", "drained"))
	if out := s.run("lb1", "undrain", name); !strings.Contains(out, "gets new connections again") {
		t.Errorf("undrain: %s", out)
	}
	s.agree(has("s1", "unchecked"))
	if out := s.run("lb2", "server", "remove", name); !strings.Contains(out, "removed") {
		t.Errorf("remove: %s", out)
	}
	s.agree(lacks("s1"))
	out := s.run("lb1", "store", "export", "-c", s.file)
	if !strings.Contains(out, "remove: true") || !strings.Contains(out, "name: s2") {
		t.Errorf("export: %s", out)
	}
	out = s.run("lb1", "status")
	if !strings.Contains(out, "\nstore: version ") {
		t.Errorf("status shows no store: %s", out)
	}
	if out := s.run("lb2", "store", "status"); !strings.Contains(out, "follows: ") {
		t.Errorf("store status: %s", out)
	}
	s.requireRefusal("lb2", "limit is 30 percent", "service", "remove", s.service.Name)
	s.requireMetricsOfWaiting("lb1")
}

// requireMetricsOfWaiting starts a balancer that knows nothing of the store. Its metrics tell that it
// waits, and since when.
func (s *site) requireMetricsOfWaiting(balancer string) {
	s.Helper()
	p, node := s.lab.Process(balancer, "lb"), s.lab.Node(balancer).BalancerConfig().Node
	must(s.T, p.Stop())
	must(s.T, os.Remove(store.CacheFile(node.State, node.Instance)))
	s.toStore((*etcdtest.Proxy).Cut, balancer)
	began := time.Now()
	started := make(chan error, 1)
	go func() { started <- p.Start(s.Context()) }()
	eventually(s.T, func() error {
		metrics, err := s.lab.Node(balancer).Run(s.Context(), "curl", "-sS", "--fail", "http://127.0.0.1:9188/metrics")
		if err != nil {
			return err
		}
		if !strings.Contains(metrics, "\nsegue_lb_store_waiting 1\n") {
			return fmt.Errorf("the metrics do not tell that the balancer waits:\n%s", metrics)
		}
		_, since, _ := strings.Cut(metrics, "\nsegue_lb_store_waiting_since_timestamp_seconds ")
		seconds, err := strconv.ParseFloat(strings.Split(since, "\n")[0], 64)
		if at := time.UnixMilli(int64(1000 * seconds)); err != nil || at.Before(began) || at.After(time.Now()) {
			s.Errorf("waits since %s, error %v; want since %s", at, err, began)
		}
		return nil
	})
	s.toStore((*etcdtest.Proxy).Heal, balancer)
	must(s.T, <-started)
	metrics := command(s.T, s.lab, balancer, "curl", "-sS", "--fail", "http://127.0.0.1:9188/metrics")
	if !strings.Contains(metrics, "\nsegue_lb_store_waiting 0\n") ||
		strings.Contains(metrics, "segue_lb_store_waiting_since") {
		s.Errorf("the metrics after the start:\n%s", metrics)
	}
}

// requireRefusal runs segue on a node, which must fail.
func (s *site) requireRefusal(node, want string, args ...string) {
	s.Helper()
	out, err := s.lab.Node(node).Run(s.Context(), segue, args...)
	if err == nil || !strings.Contains(out+err.Error(), want) {
		s.Errorf("segue %s: %s, error %v; want %s", strings.Join(args, " "), out, err, want)
	}
}

// fault is a fault of the store or of the way to it, with changes of servers meanwhile.
type fault struct {
	name  string
	cause func(*site)
	// end ends the fault. The balancers have to agree after it.
	end func(*site)
	// agreed tells from a digest whether the changes have taken effect.
	agreed func(string) bool
}

// storeFaults are the faults of TestStoreFaults.
var storeFaults = []fault{
	{
		name:   "no fault, a server drained",
		cause:  func(*site) {},
		end:    func(s *site) { s.run("lb1", "drain", s.service.Name+"/s4") },
		agreed: has("s4", "drained"),
	},
	{
		name:   "no fault, a server undrained",
		cause:  func(*site) {},
		end:    func(s *site) { s.run("lb2", "undrain", s.service.Name+"/s4") },
		agreed: has("s4", "unchecked"),
	},
	{
		name: "one balancer in a partition",
		cause: func(s *site) {
			s.toStore((*etcdtest.Proxy).Cut, "lb1")
			s.awaitStatus("lb1", "NOT REACHABLE")
			s.run("lb2", "drain", s.service.Name+"/s4")
		},
		end: func(s *site) { s.toStore((*etcdtest.Proxy).Heal, "lb1") }, agreed: has("s4", "drained"),
	},
	{
		name: "all balancers in a partition, one restarts",
		cause: func(s *site) {
			s.toStore((*etcdtest.Proxy).Cut, s.balancers...)
			s.awaitStatus("lb2", "NOT REACHABLE")
			restart(s.T, s.lab.Process("lb1", "lb"))
			s.awaitStatus("lb1", "NOT REACHABLE")
		},
		end: func(s *site) {
			s.toStore((*etcdtest.Proxy).Heal, s.balancers...)
			s.run("lb1", "undrain", s.service.Name+"/s4")
		},
		agreed: has("s4", "unchecked"),
	},
	{
		name:  "the store restarts",
		cause: func(s *site) { s.etcd.Kill() },
		end: func(s *site) {
			s.etcd.Run()
			s.run("lb2", "server", "set", s.service.Name+"/s4", "weight=2")
		},
		agreed: func(digest string) bool { return strings.HasPrefix(digest, "generation 2 ") },
	},
	{
		name: "the store compacts during a partition",
		cause: func(s *site) {
			s.toStore((*etcdtest.Proxy).Cut, "lb2")
			s.awaitStatus("lb2", "NOT REACHABLE")
			s.run("lb1", "server", "set", s.service.Name+"/s4", "weight=1")
			s.etcd.Compact()
		},
		end:    func(s *site) { s.toStore((*etcdtest.Proxy).Heal, "lb2") },
		agreed: func(digest string) bool { return strings.HasPrefix(digest, "generation 3 ") },
	},
	{
		name: "the store is slow",
		cause: func(s *site) {
			s.toStore(func(p *etcdtest.Proxy) { p.Delay(500 * time.Millisecond) }, s.balancers...)
		},
		end:    func(s *site) { s.run("lb2", "drain", s.service.Name+"/s4") },
		agreed: has("s4", "drained"),
	},
	{
		name: "the store loses its content, and is filled again",
		cause: func(s *site) {
			s.toStore(func(p *etcdtest.Proxy) { p.Delay(0) }, s.balancers...)
			s.etcd.Kill()
			s.etcd.Lose()
			s.etcd.Run()
			for _, name := range s.balancers {
				s.awaitStatus(name, "NOT FOLLOWED")
			}
		},
		end: func(s *site) {
			kept := s.run("lb1", "store", "export", "-c", s.file, "--cache")
			must(s.T, os.WriteFile(s.services, []byte(kept), 0o644))
			s.run("lb1", "store", "import", "-c", s.file, s.services)
		},
		agreed: has("s4", "drained"),
	},
}

// clusterFaults are the faults of TestStoreClusterFaults.
var clusterFaults = []fault{
	{
		name:  "the leader of three members is killed, a server drained at that moment",
		cause: func(*site) {},
		end: func(s *site) {
			s.etcd = s.cluster.Leader()
			s.etcd.Kill()
			s.run("lb1", "drain", s.service.Name+"/s4")
		},
		agreed: has("s4", "drained"),
	},
	{
		name: "one balancer reaches only a member without a majority, a server undrained meanwhile",
		cause: func(s *site) {
			s.etcd.Run()
			s.etcd = s.cluster.Leader()
			s.cluster.Isolate(s.etcd)
			s.onlyReaches("lb1", s.etcd, (*etcdtest.Proxy).Cut)
			s.awaitStatus("lb1", "NOT REACHABLE")
			s.run("lb2", "undrain", s.service.Name+"/s4")
		},
		end: func(s *site) {
			s.cluster.Rejoin(s.etcd)
			s.toStore((*etcdtest.Proxy).Heal, "lb1")
		},
		agreed: has("s4", "unchecked"),
	},
	{
		name: "a member loses its disk, and is replaced, a generation meanwhile",
		cause: func(s *site) {
			s.etcd = s.cluster.Other(s.cluster.Leader())
			s.etcd.Kill()
			s.etcd.Lose()
			s.run("lb1", "server", "set", s.service.Name+"/s4", "weight=2")
			s.agree(func(digest string) bool { return strings.HasPrefix(digest, "generation 2 ") })
		},
		end: func(s *site) {
			s.cluster.Replace(s.etcd)
			for _, name := range s.balancers { // they have the drain from the new member
				s.onlyReaches(name, s.etcd, (*etcdtest.Proxy).Refuse)
			}
			s.run("lb2", "drain", s.service.Name+"/s4")
		},
		agreed: has("s4", "drained"),
	},
}

// awaitStatus waits until segue status shows a problem with the store.
func (s *site) awaitStatus(balancer, problem string) {
	s.Helper()
	eventually(s.T, func() error {
		out, err := s.lab.Node(balancer).Run(s.Context(), segue, "status")
		if err == nil && !strings.Contains(out, problem) {
			err = fmt.Errorf("%s: no %q in the status:\n%s", balancer, problem, out)
		}
		return err
	})
}

// TestStoreFaults causes each fault under live connections and new ones. No connection is lost,
// also when all traffic moves to the other balancer after the fault.
func TestStoreFaults(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	var log sharedFile
	watch := exec.CommandContext(t.Context(), segue, "events")
	watch.Stdout, watch.Stderr = &log, &log
	must(t, s.lab.Node("lb2").Start(watch))
	s.suffer(storeFaults)
	must(t, watch.Process.Signal(os.Interrupt))
	must(t, watch.Wait())
	for _, event := range []string{" store_down", " store_up", " store_held", " store_followed"} {
		if !strings.Contains(log.String(), event) {
			t.Errorf("no event%s in\n%s", event, &log)
		}
	}
}

// TestStoreClusterFaults does the same as TestStoreFaults with the faults of a store of three
// members.
func TestStoreClusterFaults(t *testing.T) {
	t.Parallel()
	newClusteredSite(t, 4).suffer(clusterFaults)
}

// suffer causes faults under live connections and new ones.
func (s *site) suffer(faults []fault) {
	t := s.T
	const connections = 100
	live := open(t, s.lab, connections, s.service)
	v := startVisitors(t, s.lab, 2, s.service)
	for _, f := range faults {
		before := v.answered.Load()
		f.cause(s)
		live.rounds(t, 1)
		began := time.Now()
		f.end(s)
		s.agree(f.agreed)
		took := time.Since(began)
		for _, balancer := range s.balancers { // each takes all flows of the other
			must(t, s.lab.SetNextHops(balancer))
			live.rounds(t, 1)
		}
		must(t, s.lab.SetNextHops(s.balancers...))
		live.rounds(t, 1)
		lost := slices.DeleteFunc(slices.Clone(live.connections),
			func(c *connection) bool { return c.failure() == nil })
		v.mu.Lock()
		failed := len(v.failures)
		v.failures = nil
		v.mu.Unlock()
		t.Logf("| %s | %.1f s | %d of %d | %d of %d |", f.name, took.Seconds(), len(lost), connections,
			failed, v.answered.Load()-before)
		if len(lost) > 0 {
			t.Fatalf("%s: %d connections are lost, for one: %v", f.name, len(lost), lost[0].failure())
		}
		if failed > 0 {
			t.Errorf("%s: %d new connections failed", f.name, failed)
		}
	}
}
