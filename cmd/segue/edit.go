// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/wording"
)

// target is the process that a command changes, and the conditions of the change.
type target struct {
	instance      string
	dryRun        bool
	allowRemovals bool
	// replacesAll tells that the command replaces all services of the process, as apply does. Then
	// removals have a limit even without a store.
	replacesAll bool
	ifVersion   versionFlag
}

// versionFlag is the value of --if-version. It must not be empty: if a script failed to get a
// version, the change would be made without any condition.
type versionFlag string

func (v *versionFlag) Set(text string) error {
	if text == "" {
		return errors.New("empty")
	}
	*v = versionFlag(text)
	return nil
}

func (v *versionFlag) String() string { return string(*v) }

func (v *versionFlag) Type() string { return "version" }

func (t *target) addFlags(cmd *cobra.Command) {
	instanceFlag(cmd, &t.instance)
	cmd.Flags().BoolVar(&t.dryRun, "dry-run", false,
		"show what would change and the version in force, and change nothing")
	cmd.Flags().Var(&t.ifVersion, "if-version",
		"change something only if this `version` is in force, as a dry run shows it")
}

// addRemovalFlag adds the flag --allow-removals with a description for this command.
func (t *target) addRemovalFlag(cmd *cobra.Command, usage string) {
	cmd.Flags().BoolVar(&t.allowRemovals, "allow-removals", false, usage)
}

// setTerms gives a client the conditions of the command's change. Without a store, only commands
// that replace all services have a limit for removals, and an agent never has a store. So setTerms
// refuses --allow-removals in other commands for an agent.
func (t *target) setTerms(ctx context.Context, client *api.Client) error {
	client.IfVersion, client.AllowRemovals = string(t.ifVersion), t.allowRemovals
	if !t.allowRemovals || t.replacesAll {
		return nil
	}
	self, err := client.Identify(ctx)
	if err == nil && self.Role != api.RoleBalancer {
		return fmt.Errorf("--allow-removals: instance %q is an agent, which has no store", self.Name)
	}
	return err
}

func instanceFlag(cmd *cobra.Command, instance *string) {
	cmd.Flags().StringVarP(instance, "instance", "i", "",
		"`name` of the instance (default: the only one in this network namespace)")
}

// kind is what a command edits: services, or servers.
type kind struct {
	noun     string // service or server
	name     string // the name as an argument in the help, such as SERVICE/SERVER
	example  string // an example of a name
	fields   string // an example of the fields of a new service or server
	settings string // an example of fields to set
	json     string // describes what list --json prints
	// parse splits a name into the names of the service and the server.
	parse func(name string) (service, server string, err error)
	// views has an item for each role whose processes have the kind. Agents have only services.
	views map[string]view
}

// view tells how the processes of a role list their services or servers.
type view struct {
	names  func(ctx context.Context, client *api.Client) ([]string, error)
	list   func(ctx context.Context, client *api.Client, out io.Writer, asJSON bool) error
	fields reflect.Type // the struct with the fields
}

var serviceKind = kind{
	noun: "service", name: "SERVICE", example: "web",
	fields:   "vip=2001:db8:80::1 port=80 protocol=tcp",
	settings: "placement=hunt timeouts.new=30s",
	json: `--json prints an object with the key services: the services as GET /v1/services of the API
has them.`,
	parse: func(name string) (service, server string, err error) { return name, "", nil },
	views: map[string]view{
		api.RoleBalancer: {
			names:  namesOf((*api.Client).Services, serviceNames),
			list:   listOf((*api.Client).Services, listServices, servicesObject[api.Service]),
			fields: reflect.TypeFor[desired.Service](),
		},
		api.RoleAgent: {
			names:  namesOf((*api.Client).AgentServices, agentServiceNames),
			list:   listOf((*api.Client).AgentServices, listAgentServices, servicesObject[api.AgentService]),
			fields: reflect.TypeFor[desired.AgentService](),
		},
	},
}

var serverKind = kind{
	noun: "server", name: "SERVICE/SERVER", example: "web/s4",
	fields:   "locator=fd00:5:0:4::/64 weight=2",
	settings: "weight=10",
	json: `--json prints an object with the key servers. A server has the fields of the API and the key
service, the name of its service.`,
	parse: parseServerName,
	views: map[string]view{
		api.RoleBalancer: {
			names:  namesOf((*api.Client).Services, serverNames),
			list:   listOf((*api.Client).Services, listServers, serversObject),
			fields: reflect.TypeFor[desired.Server](),
		},
	},
}

// namesOf returns a function for view.names. It reads all items, and returns their names.
func namesOf[T any](
	read func(*api.Client, context.Context) ([]T, error), names func([]T) []string,
) func(context.Context, *api.Client) ([]string, error) {
	return func(ctx context.Context, client *api.Client) ([]string, error) {
		all, err := read(client, ctx)
		return names(all), err
	}
}

// listOf returns a function for view.list. It reads all items, and prints them as a table or JSON.
func listOf[T any](
	read func(*api.Client, context.Context) ([]T, error), list func(io.Writer, []T), object func([]T) any,
) func(context.Context, *api.Client, io.Writer, bool) error {
	return func(ctx context.Context, client *api.Client, out io.Writer, asJSON bool) error {
		all, err := read(client, ctx)
		switch {
		case err != nil:
			return err
		case asJSON:
			return cli.PrintJSON(out, object(all))
		}
		list(out, all)
		return nil
	}
}

// open returns a client of an instance on this host, and the view for its role.
func (k *kind) open(ctx context.Context, instance string) (*api.Client, view, error) {
	client, role, err := connect(ctx, instance)
	if err != nil {
		return nil, view{}, err
	}
	v, ok := k.views[role]
	if !ok {
		return nil, v, fmt.Errorf("instance %q is an agent, whose services have no servers: name a balancer with "+
			"--instance", client.Instance())
	}
	return client, v, nil
}

func newService() *cobra.Command { return serviceKind.command() }

func newServer() *cobra.Command { return serverKind.command() }

// command returns the commands that list and edit services or servers.
func (k kind) command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   k.noun + " list|add|set|remove|reset",
		Short: fmt.Sprintf("List and change the %ss of %s", k.noun, k.owners()),
		Long: fmt.Sprintf(`List and change the %ss of %s.

Changes are stored as overrides, not in the configuration file. They hold across reloads and
restarts. segue status shows them apart from the configuration file.`, k.noun, k.owners()),
	}
	cmd.AddCommand(k.listCommand(), k.addCommand(), k.setCommand(), k.removeCommand(), k.resetCommand())
	return cmd
}

// owners names the processes that have the kind.
func (k kind) owners() string {
	if _, ok := k.views[api.RoleAgent]; ok {
		return "a running balancer or agent"
	}
	return "a running balancer"
}

func (k kind) listCommand() *cobra.Command {
	var instance string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: fmt.Sprintf("List the %ss with their overrides", k.noun),
		Long: fmt.Sprintf(`List the %ss with their overrides.

%s`, k.noun, k.json),
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, view, err := k.open(cmd.Context(), instance)
			if err != nil {
				return err
			}
			return view.list(cmd.Context(), client, cmd.OutOrStdout(), asJSON)
		},
	}
	instanceFlag(cmd, &instance)
	cli.JSONFlag(cmd, &asJSON)
	return cmd
}

func (k kind) addCommand() *cobra.Command {
	return k.editCommand(&cobra.Command{
		Use:   fmt.Sprintf("add %s FIELD=VALUE...", k.name),
		Short: fmt.Sprintf("Add a %s", k.noun),
		Long: fmt.Sprintf(`Add a %s. FIELD is the name of a field in the configuration file. The name of a field in a
section has a dot: timeouts.new=30s sets the field new of the section timeouts.`, k.noun),
		Example: fmt.Sprintf("  segue %s add %s %s", k.noun, k.example, k.fields),
	}, func(fields desired.Fields) api.Edit { return api.Edit{Override: api.Override{Add: fields}} })
}

func (k kind) setCommand() *cobra.Command {
	return k.editCommand(&cobra.Command{
		Use:   fmt.Sprintf("set %s FIELD=VALUE...", k.name),
		Short: fmt.Sprintf("Set fields of a %s", k.noun),
		Long: fmt.Sprintf(`Set fields of a %s. FIELD is the name of a field in the configuration file. The name of a
field in a section has a dot: timeouts.new=30s sets the field new of the section timeouts.
FIELD= without a value removes the field. Then the default of the field holds.`, k.noun),
		Example: fmt.Sprintf("  segue %s set %s %s", k.noun, k.example, k.settings),
	}, func(fields desired.Fields) api.Edit { return api.Edit{Override: api.Override{Set: fields}} })
}

func (k kind) removeCommand() *cobra.Command {
	return k.editCommand(&cobra.Command{
		Use:   "remove " + k.name,
		Short: fmt.Sprintf("Remove a %s", k.noun),
		Long: fmt.Sprintf(`Remove a %s. It may be one of the configuration file: then reset undoes the removal. The
connections of a removed %s break: drain servers first.`, k.noun, k.noun),
		Example: fmt.Sprintf("  segue %s remove %s", k.noun, k.example),
	}, func(desired.Fields) api.Edit { return api.Edit{Override: api.Override{Remove: true}} })
}

func (k kind) resetCommand() *cobra.Command {
	what := "the overrides of a server"
	if k.noun == "service" {
		what = "the overrides of a service and of its servers"
	}
	return k.editCommand(&cobra.Command{
		Use:     "reset " + k.name,
		Short:   "Remove " + what,
		Long:    fmt.Sprintf("Remove %s. Then the configuration file\nholds again.", what),
		Example: fmt.Sprintf("  segue %s reset %s", k.noun, k.example),
	}, func(desired.Fields) api.Edit { return api.Edit{Reset: true} })
}

// editCommand completes a command that sends one edit to the process. Its first argument is the
// name of a service or server. If its usage contains FIELD=VALUE, the other arguments are fields,
// which the function edit gets.
func (k kind) editCommand(cmd *cobra.Command, edit func(desired.Fields) api.Edit) *cobra.Command {
	var t target
	takesFields := strings.Contains(cmd.Use, "FIELD=VALUE")
	cmd.Args = cli.Arguments(k.name)
	if takesFields {
		cmd.Args = cli.Arguments(k.name, "FIELD=VALUE...")
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		fields, err := parseFields(args[1:])
		if err != nil {
			return err
		}
		return k.send(cmd.Context(), cmd.OutOrStdout(), &t, args[0], edit(fields))
	}
	cmd.ValidArgsFunction = func(
		cmd *cobra.Command, args []string, word string,
	) ([]string, cobra.ShellCompDirective) {
		switch {
		case len(args) == 0:
			return k.complete(cmd.Context(), t.instance), cobra.ShellCompDirectiveNoFileComp
		case takesFields:
			return k.completeFields(cmd.Context(), t.instance, word),
				cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	t.addFlags(cmd)
	t.addRemovalFlag(cmd,
		"remove servers even if they are more than the limit of the store (store.max-removed-percent)")
	return cmd
}

// send puts a name into an edit, sends the edit to the process, and prints the changes.
func (k kind) send(ctx context.Context, out io.Writer, t *target, name string, e api.Edit) error {
	var err error
	if e.Service, e.Server, err = k.parse(name); err != nil {
		return err
	}
	client, _, err := k.open(ctx, t.instance)
	if err != nil {
		return err
	}
	if err := t.setTerms(ctx, client); err != nil {
		return err
	}
	changed, err := client.Change(ctx, t.dryRun, e)
	if err != nil {
		return err
	}
	printChanged(out, changed, t.dryRun)
	return nil
}

// printChanged prints the effect of a change.
func printChanged(out io.Writer, changed *api.Changed, dryRun bool) {
	if len(changed.Changes) == 0 {
		fmt.Fprintln(out, "nothing to change")
	}
	var changes desired.Changes
	for _, c := range changed.Changes {
		changes = append(changes, desired.Change{What: c.Kind, Names: c.Items})
	}
	for _, line := range changes.Lines() {
		if dryRun {
			line = "dry run: " + line
		}
		fmt.Fprintln(out, line)
	}
	for _, loss := range changed.Losses {
		fmt.Fprintln(out, describeLoss(&loss))
	}
	tellWarnings(out, changed.Warnings)
	if dryRun {
		fmt.Fprintln(out, "dry run: version", changed.Version)
	}
}

// describeLoss tells which flows or connections a change breaks, and why.
func describeLoss(l *api.Loss) string {
	noun := "live flow"
	if l.Server == "" {
		noun = "open connection"
	}
	flows := fmt.Sprintf("an unknown number of %ss", noun)
	if l.Flows != nil {
		flows = wording.Count(int(*l.Flows), noun)
	}
	if l.Server == "" {
		return fmt.Sprintf("%s is removed from this server with %s", l.Service, flows)
	}
	switch l.Cause {
	case string(desired.LossForgotten):
		return fmt.Sprintf("%s/%s leaves the history with %s: a balancer that does not know them cannot "+
			"find their server", l.Service, l.Server, flows)
	case string(desired.LossMoved):
		return fmt.Sprintf("%s/%s gets another address or VIP, and loses %s", l.Service, l.Server, flows)
	case string(desired.LossNarrowed):
		return fmt.Sprintf("%s gets fewer VIPs or ports: of %s, %s/%s loses those of the others",
			l.Service, flows, l.Service, l.Server)
	}
	return fmt.Sprintf("%s/%s is removed with %s", l.Service, l.Server, flows)
}

func tellWarnings(out io.Writer, warnings []string) {
	for _, warning := range warnings {
		fmt.Fprintln(out, "warning:", warning)
	}
}

// parseFields reads arguments FIELD=VALUE. A FIELD of several names, such as timeouts.new, becomes
// a field of a nested map.
func parseFields(args []string) (desired.Fields, error) {
	fields := desired.Fields{}
	for _, arg := range args {
		path, value, ok := strings.Cut(arg, "=")
		if !ok || path == "" {
			return nil, fmt.Errorf("%q: must be FIELD=VALUE, such as weight=10", arg)
		}
		names := strings.Split(path, ".")
		sections, last := names[:len(names)-1], names[len(names)-1]
		into := map[string]any(fields)
		for _, section := range sections {
			if _, isGiven := into[section]; !isGiven {
				into[section] = map[string]any{}
			}
			inner, isSection := into[section].(map[string]any)
			if !isSection {
				return nil, fmt.Errorf("%q: %s has a value already", arg, section)
			}
			into = inner
		}
		if _, twice := into[last]; twice {
			return nil, fmt.Errorf("%q: %s is given twice", arg, path)
		}
		into[last] = parseValue(value)
	}
	return fields, nil
}

// parseValue returns the JSON value for a text. A number stays a string: a number of JSON could
// lose digits of an ID, and the process reads numbers from strings, too.
func parseValue(text string) any {
	switch text {
	case "":
		return nil // removes the field
	case "true", "false":
		return text == "true"
	}
	return text
}

// parseServerName splits SERVICE/SERVER. Names have no slashes.
func parseServerName(name string) (service, server string, err error) {
	service, server, ok := strings.Cut(name, "/")
	if !ok || service == "" || server == "" || strings.Contains(server, "/") {
		return "", "", fmt.Errorf("%q: must be SERVICE/SERVER, such as web/s1", name)
	}
	return service, server, nil
}

func serviceNames(services []api.Service) (names []string) {
	for _, s := range services {
		names = append(names, s.Name)
	}
	return names
}

func serverNames(services []api.Service) (names []string) {
	for _, service := range services {
		for _, server := range service.Servers {
			names = append(names, service.Name+"/"+server.Name)
		}
	}
	return names
}

func agentServiceNames(services []api.AgentService) (names []string) {
	for _, s := range services {
		names = append(names, s.Name)
	}
	return names
}

// complete returns the names of an instance's services or servers, for shell completion.
func (k *kind) complete(ctx context.Context, instance string) []string {
	client, view, err := k.open(ctx, instance)
	if err != nil {
		return nil
	}
	names, _ := view.names(ctx, client)
	return names
}

// completeFields returns the fields of a service or server that begin with a word, for shell
// completion. If no process answers, they are the fields that a balancer has.
func (k *kind) completeFields(ctx context.Context, instance, word string) []string {
	_, v, err := k.open(ctx, instance)
	if err != nil {
		v = k.views[api.RoleBalancer]
	}
	return completeFields(v.fields, word)
}

// completeFields returns the fields of a struct that begin with a word, each with an equals sign.
// There are none if the word has an equals sign already.
func completeFields(of reflect.Type, word string) (words []string) {
	if strings.Contains(word, "=") {
		return nil
	}
	for _, path := range fieldPaths(of, "") {
		if strings.HasPrefix(path, word) {
			words = append(words, path+"=")
		}
	}
	return words
}

// fieldPaths returns the paths of the fields of a struct and its sections, such as timeouts.new. It
// leaves out the field "name", lists, and fields that files do not have. A struct of another
// package, such as netip.Addr, is not a section.
func fieldPaths(of reflect.Type, prefix string) (paths []string) {
	for _, f := range reflect.VisibleFields(of) {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		isInFiles := name != "" && name != "-"
		isSection := inner.Kind() == reflect.Struct && inner.PkgPath() == of.PkgPath()
		switch {
		case !isInFiles || name == "name" || inner.Kind() == reflect.Slice:
		case isSection:
			paths = append(paths, fieldPaths(inner, prefix+name+".")...)
		default:
			paths = append(paths, prefix+name)
		}
	}
	return paths
}

// allOf returns the items of a list as one text. If the list is empty, it returns the first item.
func allOf(list []string, first string) string {
	if len(list) == 0 {
		return first
	}
	return strings.Join(list, ",")
}

// listServices prints a table of services.
func listServices(out io.Writer, services []api.Service) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SERVICE\tVIP\tPORT\tPROTOCOL\tPLACEMENT\tPERSISTENCE\tENCAPSULATION\tSERVERS\tOVERRIDE")
	for _, s := range services {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", s.Name, allOf(s.VIPs, s.VIP), allOf(s.Ports, s.Port), s.Protocol,
			s.Placement, s.Persistence, s.Encapsulation, len(s.Servers), orDash(s.Override))
	}
	w.Flush()
}

// listAgentServices prints a table of an agent's services. The policy of a drained service is shown
// as drained.
func listAgentServices(out io.Writer, services []api.AgentService) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SERVICE\tVIP\tPORT\tPROTOCOL\tENCAPSULATION\tPOLICY\tCONNECTIONS\tOVERRIDE")
	for _, s := range services {
		policy, connections := "-", "-"
		switch {
		case s.Drained:
			policy = "drained"
		case s.Accept != nil:
			policy = s.Accept.Policy
		}
		if s.Connections != nil {
			connections = strconv.FormatUint(uint64(*s.Connections), 10)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Name, allOf(s.VIPs, s.VIP), allOf(s.Ports, s.Port), s.Protocol,
			s.Encapsulation, policy, connections, orDash(s.Override))
	}
	w.Flush()
}

// servicesObject returns the object that list --json prints for services.
func servicesObject[T any](services []T) any {
	return map[string][]T{"services": append([]T{}, services...)} // never null
}

// listedServer is a server as list --json prints it.
type listedServer struct {
	Service string `json:"service"`
	api.Server
}

// serversObject returns the object that list --json prints for servers.
func serversObject(services []api.Service) any {
	all := []listedServer{}
	for _, s := range services {
		for _, server := range s.Servers {
			all = append(all, listedServer{s.Name, server})
		}
	}
	return map[string][]listedServer{"servers": all}
}

// listServers prints a table of servers.
func listServers(out io.Writer, services []api.Service) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SERVER\tADDRESS\tWEIGHT\tCONDITION\tFLOWS\tOVERRIDE")
	for _, s := range services {
		for _, server := range s.Servers {
			flows := "-"
			if server.Flows != nil {
				flows = strconv.FormatUint(server.Flows.Live, 10)
			}
			fmt.Fprintf(w, "%s/%s\t%s\t%d\t%s\t%s\t%s\n", s.Name, server.Name, server.Address,
				server.Weight, server.Condition, flows, orDash(server.Override))
		}
	}
	w.Flush()
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
