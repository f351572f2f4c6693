// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/testhost"
)

// someInstances are two instances in this network namespace, and three in others.
func someInstances() (here, elsewhere []datapath.Located) {
	eth0 := &datapath.Attachment{Ifindex: 2, Interface: "eth0", Mode: datapath.Native}
	eth1 := &datapath.Attachment{Ifindex: 3, Interface: "eth1", Mode: datapath.Generic}
	away := &datapath.Attachment{Ifindex: 2}
	instance := func(name string, role datapath.Role) datapath.Instance {
		return datapath.Instance{Name: name, Role: role}
	}
	here = []datapath.Located{
		{Instance: instance("agent", datapath.RoleAgent), Attachment: eth0},
		{Instance: instance("lb", datapath.RoleBalancer), Attachment: eth1},
	}
	elsewhere = []datapath.Located{
		{Instance: instance("s1", datapath.RoleAgent), Attachment: away, Namespace: "/run/netns/s1"},
		{Instance: instance("s2", datapath.RoleAgent), Attachment: away},
		{Instance: instance("s3", datapath.RoleAgent)},
	}
	return here, elsewhere
}

func TestListInstances(t *testing.T) {
	here, elsewhere := someInstances()
	instances := append(here, elsewhere...)
	var output bytes.Buffer
	testhost.Must(t, listInstances(&output, instances, false))
	clitest.Golden(t, "instances.txt", &output)
	output.Reset()
	testhost.Must(t, listInstances(&output, instances, true))
	clitest.Golden(t, "instances.json", &output)
}

func TestSeveralInstances(t *testing.T) {
	here, elsewhere := someInstances()
	for want, instances := range map[string][]datapath.Located{
		"this network namespace has several instances; name one with --instance: " +
			"agent, lb": append(here, elsewhere...),
		"this network namespace has no instance; name one with --instance, or enter its network " +
			"namespace with `nsenter --net=`: s1 (/run/netns/s1), s2 (another one, path unknown), " +
			"s3 (not attached)": elsewhere,
	} {
		if got := (&severalError{instances}).Error(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// TestUnknownInstance checks that the error about a mistyped name lists the instances.
func TestUnknownInstance(t *testing.T) {
	found := []datapath.Instance{{Name: "agent"}, {Name: "lb"}}
	const want = `no instance "bl" on this host; there are: agent, lb`
	if err := refuseUnknown("bl", found); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	if err := errors.Join(refuseUnknown("lb", found), refuseUnknown("bl", nil)); err != nil {
		t.Error(err)
	}
}

// TestChoose checks that a command without --instance finds the only instance of its network
// namespace, and refuses to choose if there is none or if there are two.
func TestChoose(t *testing.T) {
	testhost.NeedBPF(t)
	lb, other, nobody := testhost.NewNamespace(t), testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, lb, "eth0", nil, other, "eth0", nil)
	testhost.Connect(t, lb, "eth1", nil, other, "eth1", nil)
	name := func(i int) string { return fmt.Sprintf("test-%d-choose%d", os.Getpid(), i) }
	pinBalancer(t, lb, name(1), map[string]string{datapath.LinkPin: "eth0"})
	pinBalancer(t, other, name(2), map[string]string{datapath.LinkPin: "eth0"})
	chosen := func(in *testhost.Namespace) (instance datapath.Instance, err error) {
		_ = in.Do(func() error {
			instance, err = choose("")
			return nil
		})
		return instance, err
	}
	for i, ns := range []*testhost.Namespace{lb, other} {
		if got, err := chosen(ns); got.Name != name(i+1) || err != nil {
			t.Errorf("chose %+v, error %v; want %s", got, err, name(i+1))
		}
	}
	pinBalancer(t, lb, name(3), map[string]string{datapath.LinkPin: "eth1"})
	for ns, want := range map[*testhost.Namespace]string{
		lb:     "this network namespace has several instances",
		nobody: "this network namespace has no instance",
	} {
		if got, err := chosen(ns); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("chose %+v, error %v; want %s", got, err, want)
		}
		for _, command := range []string{"status", "status --json", "trace tcp 192.0.2.1:1 192.0.2.2:2"} {
			err := ns.Do(func() error {
				_, err := runSegue(t.Context(), strings.Fields(command)...)
				return err
			})
			if err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Errorf("segue %s: error %v, want %s", command, err, want)
			}
		}
	}
}
