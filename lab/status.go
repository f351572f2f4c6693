// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Status is the state of a lab.
type Status struct {
	Name      string          `json:"name"`
	Nodes     []NodeStatus    `json:"nodes"`
	Services  []ServiceStatus `json:"services"`
	StateDir  string          `json:"state_dir"`
	Processes int             `json:"processes_expected"`
	Running   int             `json:"processes_running"`
	Offers    []Offers        `json:"offers,omitempty"` // of services with placement hunt
	// Impairment is the lab's impairment. Impaired has the counts of the packets to each node, by
	// the name of the node. It is nil if there is no impairment.
	Impairment Impairment                  `json:"impairment"`
	Impaired   map[string]ImpairmentCounts `json:"impaired,omitempty"`
}

// NodeStatus is the state of a node.
type NodeStatus struct {
	Spec
	Namespace string          `json:"namespace"`
	Processes []ProcessStatus `json:"processes"`
}

// ProcessStatus is the state of a process.
type ProcessStatus struct {
	Name  string `json:"name"`
	Alive bool   `json:"alive"`
	PID   int    `json:"pid,omitempty"`
	Log   string `json:"log"`
}

// ServiceStatus is a service of the topology.
type ServiceStatus struct {
	Name          string `json:"name"`
	Address       string `json:"address"`
	Protocol      string `json:"protocol"`
	Encapsulation string `json:"encapsulation"`
}

// Status returns the state of the lab's nodes, processes and services, the servers' offers, and the
// counts of the impairment. While the lab reorders packets, the processes include the process
// delay. If Status cannot read offers or counts, it returns an error and the state without them.
func (l *Lab) Status() (Status, error) {
	processes := l.Processes
	if l.Topology.Impair.Reorder.some() {
		processes = append(slices.Clone(processes), l.delay)
	}
	status := Status{
		Name: l.Name, StateDir: l.path(), Processes: len(processes), Impairment: l.Topology.Impair,
	}
	for _, n := range l.Nodes {
		node := NodeStatus{Spec: n.Spec, Namespace: n.namespace(), Processes: []ProcessStatus{}}
		for _, p := range processes {
			if p.node != n {
				continue
			}
			process := ProcessStatus{Name: p.Name, Log: p.LogPath()}
			if pid, alive := p.PID(); alive {
				process.PID, process.Alive = pid, true
				status.Running++
			}
			node.Processes = append(node.Processes, process)
		}
		status.Nodes = append(status.Nodes, node)
	}
	for _, s := range l.Topology.Services {
		status.Services = append(status.Services, ServiceStatus{
			Name: s.Name, Address: s.Address().String(), Protocol: string(s.Protocol),
			Encapsulation: string(s.Encapsulation),
		})
	}
	var err error
	if status.Offers, err = l.Offers(); err != nil {
		return status, err
	}
	status.Impaired, err = l.ImpairmentCounts()
	return status, err
}

// Write prints the status as text: tables of nodes, services, offers and impaired packets.
func (s Status) Write(w io.Writer) error {
	fmt.Fprintf(w, "Lab %s: %d of %d processes running, state in %s\n\n",
		s.Name, s.Running, s.Processes, s.StateDir)
	if err := s.writeNodes(w); err != nil {
		return err
	}
	if err := s.writeServices(w); err != nil {
		return err
	}
	writeOffers(w, s.Offers)
	if !s.Impairment.Some() {
		return nil
	}
	return s.writeImpaired(w)
}

func (s Status) writeNodes(w io.Writer) error {
	table := newTable(w)
	fmt.Fprintln(table, "node\taddresses\tlocator\tprocesses\t")
	for _, n := range s.Nodes {
		addresses, locator := "-", "-"
		if own := n.addresses(); len(own) > 0 {
			addresses = strings.Trim(fmt.Sprint(own), "[]")
		}
		if n.Locator.IsValid() {
			locator = n.Locator.String()
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t", n.Name, addresses, locator)
		for i, p := range n.Processes {
			if i > 0 {
				fmt.Fprint(table, ", ")
			}
			if p.Alive {
				fmt.Fprintf(table, "%s (%d)", p.Name, p.PID)
			} else {
				fmt.Fprintf(table, "%s (NOT RUNNING, see %s)", p.Name, p.Log)
			}
		}
		fmt.Fprintln(table, "\t")
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w)
	return err
}

func (s Status) writeServices(w io.Writer) error {
	table := newTable(w)
	fmt.Fprintln(table, "service\taddress\tprotocol\tencapsulation\t")
	for _, service := range s.Services {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t\n",
			service.Name, service.Address, service.Protocol, cmp.Or(service.Encapsulation, "-"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w)
	return err
}

// writeImpaired prints the impairment in words, and its counts.
func (s Status) writeImpaired(w io.Writer) error {
	fmt.Fprintf(w, "Impaired: %s\n\n", s.Impairment)
	table := newTable(w)
	fmt.Fprintln(table, "packets to\tall\tdropped\tduplicated\treordered\t")
	for _, n := range s.Nodes {
		if c, ok := s.Impaired[n.Name]; ok {
			fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%d\t\n",
				n.Name, c.Packets, c.Dropped, c.Duplicated, c.Reordered)
		}
	}
	return table.Flush()
}

// newTable returns a writer that aligns columns, which end with tabs.
func newTable(w io.Writer) *tabwriter.Writer {
	return tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
}
