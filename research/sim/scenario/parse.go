// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/research/sim"
)

// Load reads a scenario from a file. The paths in it are relative to the file. The error is of
// type fieldpath.Errors, or an error of reading the file.
func Load(path string) (*Scenario, error) {
	s, err := config.Load(path, func(text []byte) (*Scenario, error) { return Parse(text, filepath.Dir(path)) })
	if err != nil {
		return nil, err
	}
	s.Name = strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	return s, nil
}

// Parse is Load for the content of a file. The paths in it are relative to dir. The error is of
// type fieldpath.Errors.
func Parse(text []byte, dir string) (*Scenario, error) {
	file := File{Seed: 1, Runs: 5}
	var b builder
	err := config.Decode(text, &file, func() fieldpath.Errors {
		b = builder{dir: dir, unused: make(map[string]string), used: make(map[string]bool)}
		b.scenario(&file)
		return append(b.errs, withoutValue(text)...)
	}, func() fieldpath.Errors {
		b.consequences()
		return b.errs
	})
	if err != nil {
		return nil, err
	}
	return &b.result, nil
}

// builder builds the configurations from the file, and collects the problems.
type builder struct {
	dir    string
	errs   fieldpath.Errors
	result Scenario
	later  []func() // checks that consequences calls
	// unused contains the paths that a case must use, with the problem to report if none does.
	unused map[string]string
	used   map[string]bool // paths that a case has used
}

// failf reports a problem. It reports each problem once, because several cases may share a
// section.
func (b *builder) failf(path, format string, args ...any) {
	problem := fieldpath.Error{Path: path, Problem: fmt.Sprintf(format, args...)}
	if !slices.ContainsFunc(b.errs, func(e *fieldpath.Error) bool { return *e == problem }) {
		b.errs = append(b.errs, &problem)
	}
}

// mustUse reports a problem at the end unless a case uses the path.
func (b *builder) mustUse(path, problem string) { b.unused[path] = problem }

// use notes that a case uses the path.
func (b *builder) use(path string) { b.used[path] = true }

// consequences reports problems that may be only consequences of other problems. So it runs only if
// there are no others. First it makes the later checks. If they find nothing, it reports each part
// of the file that no case uses: such a part has no effect, so it is likely a mistake.
func (b *builder) consequences() {
	for _, check := range b.later {
		check()
	}
	if len(b.errs) > 0 {
		// A reported event that changes nothing may be the one that was meant to use an unused part.
		return
	}
	for _, path := range slices.Sorted(maps.Keys(b.unused)) {
		b.require(b.used[path], path, "%s", b.unused[path])
	}
}

// require reports a problem unless ok is true.
func (b *builder) require(ok bool, path, format string, args ...any) {
	if !ok {
		b.failf(path, format, args...)
	}
}

// scenario builds the result from the content of a file.
func (b *builder) scenario(f *File) {
	b.require(f.Runs >= 1 && f.Runs <= MostRuns, "runs", "must be 1 to %d", MostRuns)
	b.result.Seed, b.result.Runs = f.Seed, f.Runs
	cases := f.Cases
	if len(cases) == 0 {
		cases = []Case{{Name: "result"}}
	}
	for i, field := range reflect.VisibleFields(reflect.TypeFor[Sections]()) {
		if !reflect.ValueOf(f.Sections).Field(i).IsZero() {
			b.mustUse(field.Tag.Get("yaml"), "is not used: every case has its own")
		}
	}
	for i := range cases {
		path := ""
		if len(f.Cases) > 0 {
			path = fmt.Sprintf("cases[%d]", i)
			b.require(caseName.MatchString(cases[i].Name), join(path, "name"), "must be letters, digits and _ - . +, a letter first")
			b.require(!slices.ContainsFunc(b.result.Cases, func(c RunnableCase) bool { return c.Name == cases[i].Name }),
				join(path, "name"), "used twice")
		}
		b.runnable(path, &f.Sections, &cases[i])
	}
	for i, a := range f.Assert {
		b.assertion(fmt.Sprintf("assert[%d]", i), a)
	}
}

// runnable reads the sections of a case, and adds the case to the result. A later check prepares a
// run of the case.
func (b *builder) runnable(path string, base *Sections, c *Case) {
	m := merger{
		builder: b, path: path,
		base: reflect.ValueOf(base).Elem(), own: reflect.ValueOf(&c.Sections).Elem(),
	}
	r := RunnableCase{Name: c.Name, Config: &sim.Config{}}
	m.servers(&r)
	m.balancers(r.Config)
	m.jobs(&r)
	m.flowTable(r.Config)
	m.network(r.Config)
	m.clients(r.Config)
	m.measure(r.Config)
	m.placement(&r)
	m.events(&r)
	m.arrivals(r.Config) // after servers and jobs, to which a load refers
	b.later = append(b.later, func() {
		if err := sim.Check(r.Config); err != nil {
			b.failf(path, "%v", err)
		}
	})
	b.result.Cases = append(b.result.Cases, r)
}

// merger finds the sections of a case: its own, or otherwise those of the file.
type merger struct {
	*builder
	path      string
	base, own reflect.Value // of Sections
}

// section returns the section with the name of a field of Sections, and its path. The section is
// nil if neither the case nor the file has it.
func section[T any](m *merger, name string) (T, string) {
	own := m.own.FieldByName(name)
	field, _ := m.own.Type().FieldByName(name)
	tag := field.Tag.Get("yaml")
	if !own.IsZero() {
		return own.Interface().(T), join(m.path, tag)
	}
	m.use(tag)
	return m.base.FieldByName(name).Interface().(T), tag
}

// given returns a value of the file, or the default if the file has none.
func given[T any](value *T, otherwise T) T {
	if value == nil {
		return otherwise
	}
	return *value
}

// join returns the path of a field in a section. The path of the whole file is empty.
func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// servers reads the groups of servers, and adds the servers of each group to the case. It also
// checks that names are distinct, and that servers and processors are not too many.
func (m *merger) servers(r *RunnableCase) {
	section, path := section[*[]Servers](m, "Servers")
	groups := given(section, nil)
	m.require(len(groups) > 0, path, "at least one group is required")
	for i, g := range groups {
		at := fmt.Sprintf("%s[%d]", path, i)
		template := m.server(at, &g)
		template.Group = int32(i)
		if g.Group == "" {
			g.Group = "g" + strconv.Itoa(i+1)
		}
		if g.Absent {
			m.mustUse(at+".absent", "no event adds servers of this group")
		}
		m.require(!slices.Contains(r.Groups, g.Group), at+".group", "used twice")
		m.require(!serverName.MatchString(g.Group), at+".group", "must not be the name of a server")
		r.Groups = append(r.Groups, g.Group)
		// Even with a huge count, one server too many is enough for the error below.
		count := min(max(g.Count, 0), mostServers+1-len(r.Config.Servers))
		for range count {
			template.Name = "s" + strconv.Itoa(len(r.Config.Servers)+1)
			r.Config.Servers = append(r.Config.Servers, template)
		}
	}
	m.require(len(r.Config.Servers) <= mostServers, path, "at most %d servers are possible", mostServers)
	cpus := int64(0)
	for i := range r.Config.Servers {
		cpus += int64(r.Config.Servers[i].CPUs)
	}
	m.require(cpus <= mostCPUs, path, "at most %d processors of all servers are possible", mostCPUs)
}

// serverName matches names that events could not distinguish from the name of a server.
var serverName = regexp.MustCompile(`^s[1-9][0-9]*$`)

const (
	mostServers = 65535
	mostCPUs    = 1 << 22 // maximum number of processors of all servers
	mostFlood   = 1e9     // SYNs per second
	mostZipf    = 10
	// MostRuns is the maximum number of runs of a case, because each run takes memory.
	MostRuns = 10000
)

// server returns what all servers of a group have in common. It reports fields that are wrong.
func (m *merger) server(path string, g *Servers) sim.Server {
	s := sim.Server{
		CPUs: given(g.CPUs, 1), Speed: given(g.Speed, 1), IOSpeed: given(g.IOSpeed, 1),
		Workers: given(g.Workers, 0), Backlog: 64, Absent: g.Absent,
	}
	m.require(g.Count >= 1 && g.Count <= mostServers, path+".count", "must be 1 to %d", mostServers)
	m.require(s.CPUs >= 1, path+".cpus", "must be at least 1")
	m.require(s.Speed > 0, path+".speed", "must be positive")
	m.require(s.IOSpeed > 0, path+".io-speed", "must be positive")
	switch g.Discipline {
	case "", "fifo":
		m.require(g.Workers == nil, path+".workers", "only with discipline processor-sharing")
	case "processor-sharing":
		s.Discipline = sim.ProcessorSharing
		m.require(g.Workers == nil || s.Workers >= 1, path+".workers", "must be at least 1")
	default:
		m.failf(path+".discipline", "must be fifo or processor-sharing")
	}
	if g.Backlog == "unlimited" {
		s.Backlog = -1
	} else if g.Backlog != "" {
		n, err := strconv.ParseUint(g.Backlog, 10, 31)
		m.require(err == nil, path+".backlog", "must be a whole number, or unlimited")
		s.Backlog = int32(n)
	}
	return s
}

const mostBalancers = 256

// balancers reads the balancers of a case: their number, their shares, and which are absent at
// first. If the section has no number, there are as many balancers as shares, or 1 without shares.
func (m *merger) balancers(c *sim.Config) {
	section, path := section[*Balancers](m, "Balancers")
	if section == nil {
		section = &Balancers{}
	}
	n := given(section.Count, max(len(section.Shares), 1))
	if n < 1 || n > mostBalancers {
		m.failf(path+".count", "must be 1 to %d", mostBalancers)
		return
	}
	m.require(len(section.Shares) == 0 || len(section.Shares) == n, path+".shares", "must have one share per balancer")
	for range n {
		c.Balancers = append(c.Balancers, sim.Share{Weight: 1})
	}
	for i, share := range section.Shares[:min(n, len(section.Shares))] {
		m.require(share > 0, fmt.Sprintf("%s.shares[%d]", path, i), "must be positive")
		c.Balancers[i].Weight = share
	}
	for i, name := range section.Absent {
		at := fmt.Sprintf("%s.absent[%d]", path, i)
		if b := m.balancer(at, name, n); b >= 0 {
			m.require(!c.Balancers[b].Absent, at, "used twice")
			m.mustUse(at, "no event adds this balancer")
			c.Balancers[b].Absent = true
		}
	}
	if a := section.Affinity; a != nil {
		at := join(path, "affinity")
		m.require(a.Clients >= 1 && a.Clients <= sim.MostClients, at+".clients", "must be 1 to %d", sim.MostClients)
		m.require(a.Zipf >= 0 && a.Zipf <= mostZipf, at+".zipf", "must be 0 to %d", mostZipf)
		c.Affinity = &sim.Affinity{Clients: a.Clients, Zipf: a.Zipf}
	}
}

// balancer returns the index of a balancer by its name, among n balancers. For an unknown name, it
// reports a problem and returns -1.
func (m *merger) balancer(path, name string, n int) int32 {
	number, err := strconv.Atoi(strings.TrimPrefix(name, "b"))
	if err != nil || name != "b"+strconv.Itoa(number) || number < 1 || number > n {
		m.failf(path, "must be b1 to b%d", n)
		return -1
	}
	return int32(number - 1)
}

// flowTable reads the limit of the flow table. An empty section sets no limit.
func (m *merger) flowTable(c *sim.Config) {
	table, path := section[*FlowTable](m, "FlowTable")
	if table == nil || *table == (FlowTable{}) {
		return
	}
	buckets, ways := given(table.Buckets, 0), given(table.Ways, 1)
	m.require(buckets >= 1 && buckets <= 1<<26, path+".buckets", "must be 1 to %d", 1<<26)
	m.require(ways >= 1 && ways <= 64, path+".ways", "must be 1 to 64")
	c.FlowTable = sim.FlowTable{Buckets: buckets, Ways: ways}
}

// network reads the delays of packets. Parts of the path that the file does not name have no delay.
func (m *merger) network(c *sim.Config) {
	n, path := section[*Network](m, "Network")
	if n == nil {
		return
	}
	for _, leg := range []struct {
		name string
		from *Distribution
		to   *sim.Distribution
	}{
		{"client-balancer", n.ClientBalancer, &c.Network.ClientBalancer},
		{"balancer-server", n.BalancerServer, &c.Network.BalancerServer},
		{"server-server", n.ServerServer, &c.Network.ServerServer},
		{"server-client", n.ServerClient, &c.Network.ServerClient},
	} {
		if leg.from != nil {
			*leg.to = m.distribution(join(path, leg.name), leg.from)
		}
	}
}

// clients reads what clients do: their timeout, what happens if a backlog is full, and the flood.
// It checks the flood later, because only the placement tells whether there is a policy.
func (m *merger) clients(c *sim.Config) {
	clients, path := section[*Clients](m, "Clients")
	if clients == nil {
		return
	}
	c.Timeout = given(clients.Timeout, 0).Seconds()
	m.require(clients.Timeout == nil || c.Timeout > 0, path+".timeout", "must be positive")
	c.Flood = clients.Flood
	m.require(c.Flood >= 0 && c.Flood <= mostFlood, path+".flood", "must be 0 to %g", mostFlood)
	m.later = append(m.later, func() {
		m.require(c.Flood == 0 || c.Policy != nil, path+".flood",
			"only with a placement by which servers decide, such as sr")
	})
	switch clients.Overflow {
	case "", "reset":
	case "drop":
		c.Silent = true
		m.require(clients.Timeout != nil, path+".overflow", "drop needs a timeout")
	default:
		m.failf(path+".overflow", "must be reset or drop")
	}
}

// measure reads when the arrivals end, and which flows are measured. Arrivals from a trace need no
// such section, because a trace has an end.
func (m *merger) measure(c *sim.Config) {
	measure, path := section[*Measure](m, "Measure")
	if measure == nil {
		arrivals, _ := section[*Arrivals](m, "Arrivals")
		m.require(arrivals != nil && arrivals.Poisson == nil, path,
			"connections or duration is required: only a trace has an end")
		return
	}
	c.Connections, c.Duration = given(measure.Connections, 0), given(measure.Duration, 0).Seconds()
	c.Warmup, c.Cooldown = measure.Warmup, measure.Cooldown
	m.require(measure.Connections == nil || c.Connections > 0, path+".connections", "must be positive")
	m.require(measure.Duration == nil || c.Duration > 0, path+".duration", "must be positive")
	m.require(measure.Connections != nil || measure.Duration != nil, path, "connections or duration is required")
	m.require(c.Warmup >= 0 && c.Warmup < 1, path+".warmup", "must be 0 to less than 1")
	m.require(c.Cooldown >= 0 && c.Warmup+c.Cooldown < 1, path+".cooldown", "must be 0 to less than 1, together with warmup")
}

// placement reads the placement, which may bring a policy of the servers.
func (m *merger) placement(r *RunnableCase) {
	p, path := section[*Placement](m, "Placement")
	if p == nil || p.Spec == nil {
		m.failf(path, "is required")
		return
	}
	var err error
	if r.Config.Placement, r.Config.Policy, err = p.Build(); err != nil {
		for _, problem := range strings.Split(err.Error(), "\n") { // one line for each parameter
			m.failf(join(path, p.name), "%s", problem)
		}
	}
}

// only returns the only field that is set in a struct of pointers. If there is not exactly one, it
// reports a problem and returns nil.
func only[T any](m *merger, path string, of *T) any {
	value := reflect.ValueOf(of).Elem()
	var names []string
	var set any
	n := 0
	for i := range value.NumField() {
		name := value.Type().Field(i).Tag.Get("yaml")
		names = append(names, name)
		if !value.Field(i).IsNil() {
			set = value.Field(i).Interface()
			n++
		}
	}
	if n != 1 {
		m.failf(path, "must be one of %s, such as {%s: {}}", strings.Join(names, ", "), names[0])
		return nil
	}
	return set
}
